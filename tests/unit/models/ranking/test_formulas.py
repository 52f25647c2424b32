"""Every click model against its paper's formula in plain torch: logits, loss and all gradients, in
training and evaluation.

Dropout is replaced by multiplication with 1 - probability, to also compare its positions and
probabilities.
"""

from typing import Any

import pytest
import torch
from builders.networks import CONFIGS, DIM, INPUTS, SEVERAL, inputs_of
from torch import nn

from rayrec import models
from rayrec.batch import Batch
from rayrec.layers import attention
from rayrec.layers import mlp as mlp_module
from rayrec.layers.kernels.list_attention import attend_lists
from rayrec.layers.keyed_embeddings import JaggedEmbeddings, KeyedEmbeddings
from rayrec.layers.mlp import MLP, Dice, GlobalBatchNorm, LogitTower, Tower
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.heads import label_heads
from rayrec.models.ranking import dcnv3, finalnet, masknet
from rayrec.models.ranking.dcnv3 import DCNv3Config
from rayrec.models.ranking.din import DINConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.models.sharded_model import _Head

ROWS = 17
Outputs = dict[str, torch.Tensor]
Fields = list[torch.Tensor]


def linear(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(values, layer.weight, layer.bias)


def dropped(net: nn.Module, values: torch.Tensor, share: float) -> torch.Tensor:
    return values * (1 - share) if net.training else values


def batch_normalized(values: torch.Tensor, norm: GlobalBatchNorm, eps: float) -> torch.Tensor:
    """Apply torch's batch norm, and keep the running statistics."""
    return nn.functional.batch_norm(
        values,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        training=norm.training,
        momentum=0.0,
        eps=eps,
    )


def standardized(values: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """Apply layer norm to the last dimension, or batch norm to the first."""
    if isinstance(norm, nn.Identity):
        return values
    if isinstance(norm, GlobalBatchNorm):
        return batch_normalized(values, norm, 1e-5)
    return nn.functional.layer_norm(values, values.shape[-1:]) * norm.weight + norm.bias


def dice(module: Dice, inputs: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(batch_normalized(inputs, module.norm, 1e-9))
    return p * inputs + (1 - p) * module.slope * inputs


def tower(net: Tower, values: torch.Tensor, dropout: float) -> torch.Tensor:
    for layer, norm, activation in zip(net.layers, net.norms, net.activations, strict=True):
        values = standardized(linear(layer, values), norm)
        values = dice(activation, values) if isinstance(activation, Dice) else values.clamp(min=0)
        values = dropped(net, values, dropout)
    return values


def logit(net: LogitTower, values: torch.Tensor, dropout: float) -> torch.Tensor:
    return linear(net.logit, tower(net.tower, values, dropout))[:, 0]


def numbers(net: nn.Module, dense: torch.Tensor) -> list[torch.Tensor]:
    return [dense[:, n : n + 1] * net.number_vectors[n] for n in range(2)]


def fields(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the vectors v_i of all features, [rows, dim] each."""
    return numbers(net, dense) + [values[:, n, :DIM] for n in range(3)]


def flattened(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat(fields(net, dense, values), dim=1)


def first_order(net: nn.Module, dense: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return w_0 + sum of w_i x_i."""
    number_term = sum(dense[:, n] * net.linear.weight[0, n] for n in range(2))
    bias = 0 if net.linear.bias is None else net.linear.bias[0]
    return bias + number_term + sum(values[:, n, DIM] for n in range(3))


def compute_linear(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute logistic regression of scaled inputs."""
    number_term = dense @ net.linear.weight[0] + net.linear.bias[0]
    return {
        "click": config.number_scale * number_term + config.category_scale * values[:, :, 0].sum(1)
    }


def compute_deepfm(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equations 1 to 4: y_FM + y_DNN."""
    v = fields(net.fields, dense, values)
    pairs = sum((v[i] * v[j]).sum(1) for i in range(5) for j in range(i + 1, 5))
    return {
        "click": first_order(net.fields, dense, values)
        + pairs
        + logit(net.deep, torch.cat(v, dim=1), config.dropout)
    }


def compute_widedeep(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equation 3: w_wide x + w_deep a + b, with an initial constant of 0 in the linear
    model.
    """
    deep = logit(net.deep, flattened(net.fields, dense, values), config.dropout)
    return {"click": first_order(net.fields, dense, values) + deep}


def compute_xdeepfm(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equations 6 to 8: x^k_h = sum over i and j of W^k_hij (x^(k-1)_i * x^0_j), summed
    over its values.
    """
    v = fields(net.fields, dense, values)
    before = v
    sums = []
    for layer in net.interaction.layers:
        weights = layer.weight.view(-1, 5, len(before))
        vectors = [
            layer.bias[h]
            + sum(weights[h, j, i] * v[j] * before[i] for j in range(5) for i in range(len(before)))
            for h in range(len(weights))
        ]
        sums += [vector.sum(1) for vector in vectors]
        before = vectors
    logits = (
        first_order(net.fields, dense, values)
        + linear(net.interaction.logit, torch.stack(sums, dim=1))[:, 0]
    )
    return {
        "click": logits
        if net.deep is None
        else logits + logit(net.deep, torch.cat(v, dim=1), config.dropout)
    }


def attention_head(
    net: nn.Module, config: ClickModelConfig, queries: Fields, keys: Fields, values: Fields
) -> Fields:
    scale = (config.attention_dim / config.heads) ** -0.5 if config.scale else 1.0
    heads = []
    for query in queries:
        exponents = [((query * key).sum(1) * scale).exp() for key in keys]
        weights = [dropped(net, each / sum(exponents), config.dropout) for each in exponents]
        heads.append(
            sum(weight[:, None] * value for weight, value in zip(weights, values, strict=True))
        )
    return heads


def compute_autoint(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equations 5 to 9 by head and field. The residual is projected if the width changes,
    as in FuxiCTR.
    """
    v = hidden = fields(net.fields if config.use_wide else net, dense, values)
    for layer in net.attention:
        projections = (layer.query, layer.key, layer.value)
        weights = (projection.weight.chunk(config.heads) for projection in projections)
        parts = [
            attention_head(net, config, *([e @ w.t() for e in hidden] for w in of_head))
            for of_head in zip(*weights, strict=True)
        ]
        residual = hidden if layer.shortcut is None else [linear(layer.shortcut, e) for e in hidden]
        hidden = [
            (torch.cat(heads, dim=1) + own).clamp(min=0)
            for *heads, own in zip(*parts, residual, strict=True)
        ]
    logits = linear(net.logit, torch.cat(hidden, dim=1))[:, 0]
    if config.use_wide:
        logits = logits + first_order(net.fields, dense, values)
    return {
        "click": logits
        if net.deep is None
        else logits + logit(net.deep, torch.cat(v, dim=1), config.dropout)
    }


def compute_dcnv2(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute x0 * (W x + b) * sigmoid(W_g x) + x, with an MLP after it, next to it, or both."""
    inner = net.network
    x0 = flattened(net, dense, values)
    x = x0
    for layer in inner.crosses:
        weight = (
            layer.linear.weight if layer.down is None else layer.linear.weight @ layer.down.weight
        )
        gate = 1 if layer.gate is None else torch.sigmoid(x @ layer.gate.weight.t())
        x = x0 * (x @ weight.t() + layer.linear.bias) * gate + x
    return {"click": after_crosses(inner, config, x0, x)}


compute_gdcn = compute_dcnv2


def compute_mixture(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute section 3.2 of DCN V2 row by row: sum of G_i(x) x0 * (U_i g(C_i g(V_i x)) + b) + x, g
    = tanh.
    """
    crosses = net.network.crosses
    x0 = flattened(net, dense, values)
    x = x0
    for layer in range(config.cross_layers):
        exponents = [(x @ crosses.gate.weight[expert]).exp() for expert in range(config.experts)]
        mixed = 0
        for expert in range(config.experts):
            hidden = torch.tanh(x @ crosses.down[layer][expert].t())
            hidden = torch.tanh(hidden @ crosses.core[layer][expert].t())
            given = x0 * (hidden @ crosses.up[layer][expert].t() + crosses.biases[layer])
            mixed = mixed + (exponents[expert] / sum(exponents))[:, None] * given
        x = mixed + x
    return {"click": after_crosses(net.network, config, x0, x)}


def after_crosses(
    inner: nn.Module, config: ClickModelConfig, x0: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    if config.structure == "stacked" or not config.mlp:
        return logit(inner.last, x, config.dropout)
    crossed = (
        tower(inner.stacked, x, config.dropout) if config.structure == "stacked_parallel" else x
    )
    return linear(
        inner.last.logit, torch.cat([crossed, tower(inner.deep, x0, config.dropout)], dim=1)
    )[:, 0]


def compute_dcnv3(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute sections 3.2 to 3.4: heads, concatenated halves of embeddings, and both networks."""
    stacked = torch.stack(fields(net, dense, values), dim=1)
    halves = [head.tensor_split(2, dim=2) for head in stacked.tensor_split(config.heads, dim=2)]
    inputs = torch.stack(
        [torch.cat([half.flatten(1) for half in pair], dim=1) for pair in halves], dim=1
    )
    outputs = {}
    for name, crosses, dropout in (
        ("deep", net.deep, config.deep_dropout),
        ("shallow", net.shallow, config.shallow_dropout),
    ):
        x = inputs
        for number, layer in enumerate(crosses.layers):
            half = linear(layer, x)
            # One mean for all values of a head
            half = standardized(half, crosses.batch_norms[number])
            mask = standardized(half, crosses.mask_norms[number]).clamp(min=0)
            crossed = torch.cat([half, half * mask], dim=2) + crosses.biases[number]
            x = dropped(net, (x if name == "deep" else inputs) * crossed + x, dropout)
        outputs[name] = linear(crosses.logit, x)[:, :, 0].mean(1)
    return {"click": (outputs["deep"] + outputs["shallow"]) / 2, **outputs}


def compute_masknet(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equations 3 to 10."""
    v = torch.stack(fields(net, dense, values), dim=1)
    features = v.flatten(1)
    hidden = (v if net.norms is None else standardized(v, net.norms)).flatten(1)
    outputs = []
    for block in net.blocks:
        mask = linear(block.second, linear(block.first, features).clamp(min=0))
        out = standardized(linear(block.layer, mask * hidden), block.norm).clamp(min=0)
        outputs.append(dropped(net, out, config.dropout))
        if config.structure == "serial":
            hidden = outputs[-1]
    together = hidden if config.structure == "serial" else torch.cat(outputs, dim=1)
    return {"click": logit(net.top, together, config.dropout)}


def compute_finalmlp(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equations 4 to 10: gates, two streams and multi-head bilinear fusion. Features are
    two numbers, a, b and c.
    """
    v = torch.stack(fields(net, dense, values), dim=1)
    streams = []
    for stream, gate, places, dropout in (
        (net.first, net.first_gate, (4, 0, 1), config.first_dropout),
        (net.second, net.second_gate, None, config.second_dropout),
    ):
        inputs = v.flatten(1)
        if gate is not None:
            if places is None:
                raw = gate.bias
            else:
                raw = linear(gate.gate, tower(gate.tower, v[:, list(places)].flatten(1), 0.0))
            inputs = inputs * 2 / (1 + torch.exp(-raw))
        streams.append(tower(stream, inputs, dropout))
    first, second = streams
    logits = linear(net.first_logit, first)[:, 0] + linear(net.second_logit, second)[:, 0]
    for head in range(2):
        part = first[:, 3 * head : 3 * head + 3]
        other = second[:, 2 * head : 2 * head + 2]
        logits = logits + torch.einsum("ri,ij,rj->r", part, net.products[head], other)
    return {"click": logits}


def compute_finalnet(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Concatenate half of each layer's linear outputs, h2, with h1 * h2. The first tower has a
    field gate. y = (y1 + y2) / 2.
    """
    v = torch.stack(fields(net, dense, values), dim=1)
    gated = v
    towers = []
    if config.feature_gate:
        gate = torch.einsum("rfd,gf->rgd", v, net.gate.weight) + net.gate.bias[None, :, None]
        gated = torch.cat([v, v * gate], dim=1)
    for tower_net, inputs, dropout in (
        (net.first, gated, config.first_dropout),
        (net.second, v, config.second_dropout),
    ):
        if tower_net is None:
            continue
        hidden = inputs.flatten(1)
        for layer, norm in zip(tower_net.layers, tower_net.norms, strict=True):
            second, first = linear(layer, hidden).chunk(2, dim=1)
            hidden = standardized(torch.cat([second, first * second], dim=1), norm)
            hidden = dropped(
                net, hidden.clamp(min=0) if config.activation == "relu" else hidden, dropout
            )
        towers.append(linear(tower_net.logit, hidden)[:, 0])
    outputs = {"click": sum(towers) / len(towers)}
    if len(towers) == 2 and config.tower_losses:
        outputs |= {"first tower": towers[0], "second tower": towers[1]}
    return outputs


def compute_wukong(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute X <- LN(concat(FMB(X), LCB(X)) + X), section 3 of the paper."""
    v = torch.stack(fields(net, dense, values), dim=1)
    for layer in net.layers:
        products = torch.einsum("rnd,rmd,mk->rnk", v, v, layer.mixing).flatten(1)
        hidden = tower(layer.tower, standardized(products, layer.products_norm), config.dropout)
        made = linear(layer.products, hidden).clamp(min=0).view(ROWS, 2, DIM)
        together = torch.cat([made, torch.einsum("ln,rnd->rld", layer.linear.weight, v)], dim=1)
        if layer.shortcut is not None:
            v = torch.einsum("on,rnd->rod", layer.shortcut.weight, v) + layer.shortcut.bias[:, None]
        v = standardized(together + v, layer.norm)
    return {"click": logit(net.top, v.flatten(1), 0.0)}


def mlp(net: MLP, values: torch.Tensor, dropout: float) -> torch.Tensor:
    """Compute an MLP of DLRM, with a norm and dropout after each layer except the last."""
    for number, layer in enumerate(net.layers):
        values, last = linear(layer, values), number == len(net.layers) - 1
        if not last and net.norms is not None:
            values = standardized(values, net.norms[number])
        if not last or net.final_activation:
            values = values.clamp(min=0)
        if not last:
            values = dropped(net, values, dropout)
    return values


def compute_dlrm(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute bottom MLP, interaction (dots, crosses x0 * (U V x + b) + x, or products of two
    projections) and top MLP.
    """
    if config.first_order:  # Halves of a deviation from -1.5 on, how far each number gets in them
        ramps = [(x - start / 2).clamp(0, 0.5) for x in dense.t() for start in range(-3, 5)]
        dense = torch.cat([dense, torch.stack(ramps, dim=1)], dim=1)
    bottom = mlp(net.bottom_mlp, dense, config.bottom_dropout)
    vectors = [bottom, *(values[:, n, :DIM] for n in range(3))]
    x0 = torch.cat(vectors, dim=1)
    if config.interaction == "dot":
        pairs = [
            (vectors[i] * vectors[j]).sum(1, keepdim=True)
            for i in range(4)
            for j in range(i + 1, 4)
        ]
        met = torch.cat([bottom, *pairs], dim=1)
    elif config.interaction == "cross":
        met = x0
        crosses = net.interaction
        for down, up, bias in zip(crosses.down, crosses.up, crosses.bias, strict=True):
            met = x0 * (met @ down.t() @ up.t() + bias) + met
    else:
        first = mlp(net.interaction.first_branch, x0, 0.0).view(ROWS, -1, DIM)
        second = mlp(net.interaction.second_branch, x0, 0.0).view(ROWS, DIM, -1)
        met = torch.cat([bottom, torch.einsum("rid,rdj->rij", first, second).flatten(1)], dim=1)
    logits = mlp(net.top_mlp, met, config.top_dropout)
    if config.first_order:
        first_order = 10 * linear(net.first_order.linear, dense) + 0.5 * values[:, :, DIM].sum(
            1, keepdim=True
        )
        logits = torch.cat([logits[:, :1] + first_order, logits[:, 1:]], dim=1)
    return {label: logits[:, number] for number, label in enumerate(SEVERAL.label_names)}


def mixture(
    gate: nn.Module, values: torch.Tensor, experts: list[torch.Tensor], dropout: float
) -> torch.Tensor:
    """Return the sum of g_i(x) f_i(x), with g the softmax of the gate."""
    exponents = linear(gate.scores, tower(gate.tower, values, dropout)).exp()
    shares = exponents / exponents.sum(1, keepdim=True)
    return sum(shares[:, n : n + 1] * expert for n, expert in enumerate(experts))


def compute_mmoe(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equations 6 and 7: y_k = h^k(sum of g^k_i(x) f_i(x))."""
    x = flattened(net, dense, values)
    p = config.dropout
    experts = [tower(expert, x, p) for expert in net.experts.towers]
    return {
        label: logit(net.towers[k], mixture(net.gates[k], x, experts, p), p)
        for k, label in enumerate(SEVERAL.label_names)
    }


def compute_ple(
    net: nn.Module, config: ClickModelConfig, dense: torch.Tensor, values: torch.Tensor
) -> Outputs:
    """Compute equations 1 to 6. A shared gate between levels weights the experts of all labels and
    the shared ones.
    """
    states = [flattened(net, dense, values)] * 4
    p = config.dropout
    for level in net.levels:
        *own, shared = (
            [tower(expert, state, p) for expert in experts.towers]
            for experts, state in zip([*level.own, level.shared], states, strict=True)
        )
        mixed = [mixture(level.gates[k], states[k], own[k] + shared, p) for k in range(3)]
        if level.shared_gate is not None:
            mixed.append(
                mixture(level.shared_gate, states[3], [*own[0], *own[1], *own[2], *shared], p)
            )
        states = mixed
    return {
        label: logit(net.towers[k], states[k], p) for k, label in enumerate(SEVERAL.label_names)
    }


def cross_entropy(logits: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits.double(), desired.double())


def reference_loss(config: ClickModelConfig, outputs: Outputs, labels: Outputs) -> torch.Tensor:
    """Return the cross entropy, FINAL's with its towers', or DCNv3's L + L_d max(0, L_d - L) + L_s
    max(0, L_s - L).
    """
    loss = cross_entropy(outputs["click"], labels["click"])
    if "like" in outputs:
        loss = loss + cross_entropy(outputs["like"], labels["like"])
        return loss + (outputs["seconds"] - labels["seconds"]).square().double().mean()
    if isinstance(config, FinalNetConfig):
        taught = torch.sigmoid(outputs["click"]).detach().double()
        return loss + sum(
            cross_entropy(outputs[name], taught) for name in outputs if name != "click"
        )
    if isinstance(config, DCNv3Config):
        own = [cross_entropy(outputs[name], labels["click"]) for name in ("deep", "shallow")]
        return loss + sum(other * (other - loss).clamp(min=0) for other in own)
    return loss


def framework_loss(net: nn.Module, outputs: Outputs, labels: Outputs) -> torch.Tensor:
    """Compute the loss of a batch as `ClickModel` does."""
    inputs = SEVERAL if "like" in outputs else INPUTS
    head = _Head(
        net,
        inputs,
        label_heads(inputs.label, inputs.more_labels),
        dim=DIM,
        penalty=0.0,
        one_by_one=set(),
    )
    return (
        head._summed_loss(outputs, Batch({"dense": torch.zeros(ROWS, 0)}, 1.0, None, labels))[0]
        / ROWS
    )


def shaken(net: nn.Module) -> nn.Module:
    """Randomize parameters that are initially 0 or 1, which a wrong formula could omit."""
    for name, parameter in net.named_parameters():
        if parameter.dim() == 1 or name.startswith(("norms.", "gate.", "linear.")):
            nn.init.normal_(parameter, std=0.5)
    for name, buffer in net.named_buffers():
        nn.init.uniform_(buffer, 0.5, 2) if name.endswith("var") else nn.init.normal_(
            buffer, std=0.3
        )
    return net


def compare(
    net: nn.Module,
    config: ClickModelConfig,
    outputs: Outputs,
    expected: Outputs,
    leaves: list[torch.Tensor],
) -> None:
    """Compare outputs and gradients of all weights and `leaves`: number features and table rows."""
    assert outputs.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(outputs[name], values, atol=1e-5, rtol=1e-5)
    chance = torch.Generator().manual_seed(2)
    labels = {
        name: torch.randint(0, 2, (ROWS,), generator=chance).float() for name in SEVERAL.label_names
    }
    loss = framework_loss(net, outputs, labels)
    desired = reference_loss(config, expected, labels)
    torch.testing.assert_close(loss.double(), desired.double(), atol=1e-5, rtol=1e-5)
    names, weights = zip(*net.named_parameters(), strict=True)
    found, right = (
        torch.autograd.grad(each, [*weights, *leaves], allow_unused=True)
        for each in (loss, desired)
    )
    for name, gradient, other in zip(
        [*names, *(f"leaf {n}" for n in range(len(leaves)))], found, right, strict=True
    ):
        assert other is not None, f"the formula does not use {name}"
        torch.testing.assert_close(
            gradient, other, atol=1e-5, rtol=1e-4, msg=lambda text, at=name: f"{at}: {text}"
        )


def leaf(*shape: int) -> torch.Tensor:
    return (0.5 * torch.randn(*shape)).requires_grad_()


@pytest.fixture(autouse=True)
def _dropout_is_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mlp_module, dcnv3, finalnet, masknet):
        monkeypatch.setattr(module, "dropped", lambda values, p: values * (1 - p))

    def attend(*arguments: Any, dropout: float, **settings: Any) -> torch.Tensor:
        return attend_lists(*arguments, dropout=0.0, **settings) * (1 - dropout)

    monkeypatch.setattr(attention, "attend_lists", attend)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_model_matches_formula(name: str, *, training: bool) -> None:
    config = CONFIGS[name]
    torch.manual_seed(0)
    net = shaken(config.build(inputs_of(config))).train(training)
    dense = leaf(ROWS, 2)
    values = leaf(ROWS, 3, config.width)
    formula = globals()[
        "compute_mixture" if name == "dcnv2 mixture" else f"compute_{name.split(maxsplit=1)[0]}"
    ]
    expected = formula(net, config, dense, values)
    outputs = net(dense, KeyedEmbeddings.in_order(INPUTS.features, config.width, values.flatten(1)))
    compare(net, config, outputs, expected, [dense, values])


LENGTHS = torch.tensor([3, 0, 5, 1, 2, 0, 4, 5, 1, 1, 2, 3, 0, 1, 5, 2, 4])


def attended(unit: nn.Module, targets: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """Compute equation 3 item by item: the sum of a(e_j, v) e_j, with a network a of both, their
    difference and product.
    """
    pairs = [(target, item) for target, items in zip(targets, rows, strict=True) for item in items]
    hidden = torch.stack(
        [torch.cat([target, item, target - item, target * item]) for target, item in pairs]
    )
    for layer, activation in zip(unit.layers, unit.activations, strict=True):
        hidden = dice(activation, linear(layer, hidden))
    weights = iter(linear(unit.weight, hidden)[:, 0])
    return torch.stack(
        [
            sum((next(weights) * item for item in items), torch.zeros_like(targets[0]))
            for items in rows
        ]
    )


TARGETS = {"history": "item", "items": "item", "shops": "shop"}
"""Sequences, and the target feature with the same vocabulary."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "features", [("item", "history", "tags"), ("item", "shop", "shops", "items")]
)
def test_din_matches_formula(features: tuple[str, ...], *, training: bool) -> None:
    """Compare a history next to summed tags, and items with shops in one unit, as FuxiCTR's
    [(items, shops)].
    """
    sequences = [name for name in features if name in TARGETS]
    pooled = [name for name in features if name not in TARGETS]
    vocabularies = tuple(TARGETS.get(name, name) for name in features)
    lists = tuple(
        (name, None if name == "tags" else 5) for name in features if name in (*TARGETS, "tags")
    )
    aligned = (("items", "shops"),) * (len(sequences) > 1)
    inputs = ModelInputs(
        2, features, "click", vocabularies=vocabularies, lists=lists, aligned=aligned
    )
    config = DINConfig(
        embedding_dim=DIM,
        attention=(6, 3),
        mlp=(8, 5),
        dropout=0.3,
    )
    torch.manual_seed(0)
    net = shaken(config.build(inputs)).train(training)
    dense = leaf(ROWS, 2)
    bags = leaf(ROWS, 2, DIM)
    items = {name: leaf(int(LENGTHS.sum()), DIM) for name in sequences}
    (unit,) = net.attention
    targets = torch.cat([bags[:, pooled.index(TARGETS[name])] for name in sequences], dim=1)
    interest = attended(
        unit, targets, list(torch.cat([*items.values()], dim=1).split(LENGTHS.tolist()))
    )
    vectors = [
        bags[:, pooled.index(name)] if name in pooled else interest
        for name in features
        if name != "items"
    ]
    together = torch.cat([*numbers(net, dense), *vectors], dim=1)
    expected = {"click": linear(net.logit, tower(net.tower, together, config.dropout))[:, 0]}
    lists = {name: JaggedEmbeddings(values, LENGTHS) for name, values in items.items()}
    given = KeyedEmbeddings.in_order(features, DIM, bags.flatten(1), lists)
    compare(net, config, net(dense, given), expected, [dense, bags, *items.values()])


def test_every_model_has_formula() -> None:
    tried = {name.split()[0] for name in CONFIGS} | {"din"}
    # An ensemble is the mean of its models: test_ensemble.py
    assert tried | {"ensemble"} == set(models.names("ranking"))
