"""Fully connected layers as one fused autograd step, because the matrix product behind `nn.Linear`
can be slow on CPUs. On CPU, products use oneDNN, which reaches 250 GFLOP/s per core in float32 on
AMD Zen 5 (MKL: 115), and adds bias and ReLU while the product is in cache. Other devices use plain
torch operators.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final, Literal, TypedDict, Unpack, final

import torch
from torch import nn
from torch.nn import functional

from rayrec.collectives import all_reduce_sum, num_workers
from rayrec.compat.torch_compat import linear_pointwise, onednn_has_bfloat16
from rayrec.host_resources import cpu_maker
from rayrec.layers.kernels.dropout import dropped
from rayrec.layers.kernels.kernel_threads import run_kernel, vectorized
from rayrec.native import c_fields

_BLOCK: Final = 64
"""Number of rows that a thread takes and sums at a time."""
_FEWEST_ROWS: Final = 2
"""Minimum row count for a variance estimate by torch's operator."""


def relu_backward_(
    gradient: torch.Tensor, output: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set `gradient` to 0 in place where `output` is not above 0, if it is given. Return it
    transposed, and summed over rows. Both inputs are [rows, columns], float32 and contiguous, on
    CPU, and are read once. A product that needs the transposed gradient would copy it again, and
    slower. The sum does not depend on the number of threads.
    """
    turned, sums = torch.ops.rayrec.relu_backward_(gradient, output)
    return turned, sums


def _relu_backward(
    gradient: torch.Tensor, output: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = gradient.shape
    blocks = -(-rows // _BLOCK)
    turned = gradient.new_empty(columns, rows)
    sums = gradient.new_zeros(blocks, columns)
    # All four are variables of this call, which outlive the kernel. `gradient` is overwritten.
    pointers = [tensor.data_ptr() for tensor in (gradient, turned, sums)]
    address = None if output is None else output.data_ptr()
    run_kernel(
        vectorized("rayrec_relu_backward"),
        _CRelu(address, *pointers, rows, columns, _BLOCK),
        blocks,
        at_once=1,
    )
    return turned, sums.sum(0)


class _CRelu(ctypes.Structure):
    """Mirror of rayrec_relu in native/kernels.h."""

    _fields_ = c_fields("void* output gradient turned sums; int64 rows columns block_rows")


# Registered as a torch operator for its profiler and modes
_OPERATORS: Final = torch.library.Library("rayrec", "FRAGMENT")
_OPERATORS.define("relu_backward_(Tensor(a!) gradient, Tensor? output) -> (Tensor, Tensor)")
_OPERATORS.impl("relu_backward_", _relu_backward, "CPU")


Precision = Literal["fp32", "bf16"]

# Below these widths, oneDNN's setup costs more than its product (measured at 1,024 to 8,192 rows).
_NARROW_OUTPUT = 8
_NARROW_INPUT = 64
_MANY_ROWS = 16_384
"""Row count above which MKL multiplies the transposed gradient as it is. To transpose it first can
take longer than the product, with rows that are too far apart (measured at 79,872 rows).
"""
_FEW_ROWS = 8
"""Maximum row count for plain operators without gradient. The setup of the fused step takes 0.1
ms.
"""


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster on this CPU than torch's default,
    which is MKL in builds for x86. For a DLRM's layers, oneDNN takes 1.1 to 1.2 times MKL's time on
    Xeons (Emerald Rapids), and .8 times on EPYCs (Zen 5).
    """
    has_mkl = torch.backends.mkl.is_available()
    return torch.backends.mkldnn.is_available() and not (has_mkl and cpu_maker() == "GenuineIntel")


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of activations and matrix products. Weights are always float32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def uses_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Return whether autocast computes in bfloat16 on a device. A CPU without instructions for it
    computes in float32: bfloat16 products take fifty times as long there (Zen 3).
    """
    return precision == "bf16" and (device.type != "cpu" or onednn_has_bfloat16())


def _linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    relu: bool,
    fused: bool,
) -> torch.Tensor:
    if fused and weight.shape[0] >= _NARROW_OUTPUT:
        return linear_pointwise(inputs, weight, bias, "relu" if relu else "none")
    output = functional.linear(inputs, weight, bias)
    return output.relu_() if relu else output


def _weight_gradient(
    gradient: torch.Tensor, inputs: torch.Tensor, *, fused: bool, input_major: bool
) -> torch.Tensor:
    """Return the weight gradient [out, in], laid out by inputs if `input_major`, as the weight is,
    and if this is faster.
    """
    if gradient.shape[1] < _NARROW_OUTPUT or len(gradient) > _MANY_ROWS:
        return gradient.t() @ inputs
    product = _onednn_product if fused and gradient.dtype == torch.float32 else torch.matmul
    if input_major and inputs.shape[1] < gradient.shape[1]:
        # oneDNN copies the transposed first factor, here the smaller one. The result needs no other
        # layout.
        return product(inputs.t(), gradient).t()
    # With few inputs, the transposed product can be three times faster
    if inputs.shape[1] < _NARROW_INPUT:
        return product(inputs.t(), gradient).t().contiguous()
    return product(gradient.t(), inputs)


def _onednn_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return linear_pointwise(left, right.t(), None, "none")


def _turns(gradient: torch.Tensor, inputs: torch.Tensor, *, fused: bool) -> bool:
    """Return whether the product for the weight's gradient would copy `gradient` to transpose
    it.
    """
    wide = gradient.shape[1] >= _NARROW_OUTPUT and inputs.shape[1] >= _NARROW_INPUT
    few = len(gradient) <= _MANY_ROWS
    return fused and wide and few and gradient.dtype == torch.float32 and gradient.is_contiguous()


def _layer_backward(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    output: torch.Tensor | None,
    *,
    fused: bool,
    input_major: bool,
    needs_bias: bool,
    may_modify: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients before the ReLU, of the weight and of the bias, if it needs one.
    `output` is None without ReLU. `may_modify`: whether `gradient` may be overwritten.
    """
    if _turns(gradient, inputs, fused=fused) and not input_major:
        gradient = gradient if may_modify or output is None else gradient.clone()
        turned, sums = relu_backward_(gradient, output)
        weight_gradient = _onednn_product(turned, inputs)
        return gradient, weight_gradient, sums if needs_bias else None
    if output is not None:
        masked = torch.ops.aten.threshold_backward
        if may_modify:  # In place, because fresh memory costs as much as the arithmetic
            masked.grad_input(gradient, output, 0, grad_input=gradient)
        else:
            gradient = masked(gradient, output, 0)
    weight_gradient = _weight_gradient(gradient, inputs, fused=fused, input_major=input_major)
    bias_gradient = gradient.sum(0).float() if needs_bias else None
    return gradient, weight_gradient.float(), bias_gradient


# Why not `nn.Linear`: the steps below save copies and passes over memory.
#
#   forward     one oneDNN call per layer: product, bias and ReLU, while the product is in cache
#   backward    last layer first; `gradient` is overwritten where it belongs to this function
#     ReLU      mask, transpose and bias gradient in one pass (`relu_backward_`), if the next
#               product needs the transposed gradient; without ReLU, transpose and bias gradient
#     weight    gradient^T x inputs, laid out as the weight is
#     input     gradient x weight, in the precision's dtype
#
# Weights are float32. With bf16, products read copies, which `ctx` keeps for the backward pass.
class _LinearStack(torch.autograd.Function):
    """Sequence of linear layers, each with or without ReLU, with an explicit backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        relus: tuple[bool, ...],
        dtype: torch.dtype,
        float_last: bool,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        # oneDNN does not support empty products, and needs AVX-512 or AMX for bfloat16.
        on_cpu = inputs.is_cpu and inputs.numel() > 0
        fused = on_cpu and onednn_is_faster()
        low_fused = fused
        if dtype == torch.bfloat16:
            low_fused = on_cpu and onednn_has_bfloat16()
        layers = len(relus)
        activations = [inputs.to(dtype)]
        weights = []
        for layer in range(layers):
            weight = parameters[2 * layer]
            bias = parameters[2 * layer + 1]
            assert weight is not None
            if float_last and layer == layers - 1:
                output = _linear(
                    activations[-1].float(), weight, bias, relu=relus[layer], fused=fused
                )
            else:
                low_bias = None if bias is None else bias.to(dtype)
                output = _linear(
                    activations[-1], weight.to(dtype), low_bias, relu=relus[layer], fused=low_fused
                )
            weights.append(weight.to(dtype))
            activations.append(output)
        # The last output is needed only if a ReLU masks the gradient.
        ctx.save_for_backward(*weights, *activations[: layers + relus[-1]])
        ctx.relus = relus
        ctx.fused = fused
        ctx.dtype = dtype
        ctx.input_dtype = inputs.dtype
        ctx.low_fused = low_fused
        ctx.float_last = float_last
        return activations[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        layers = len(ctx.relus)
        weights = ctx.saved_tensors[:layers]
        activations = ctx.saved_tensors[layers:]
        parameter_gradients: list[torch.Tensor | None] = [None] * (2 * layers)
        input_gradient: torch.Tensor | None = None
        for layer in reversed(range(layers)):
            is_last = layer == layers - 1
            inputs = activations[layer]
            if is_last and ctx.float_last:
                inputs = inputs.float()
            weight = weights[layer]
            gradient, weight_gradient, bias_gradient = _layer_backward(
                gradient,
                inputs,
                activations[layer + 1] if ctx.relus[layer] else None,
                fused=ctx.fused,
                input_major=not weight.is_contiguous(),
                needs_bias=ctx.needs_input_grad[5 + 2 * layer],
                may_modify=not is_last,  # The caller owns the gradient of the last layer
            )
            parameter_gradients[2 * layer : 2 * layer + 2] = [weight_gradient, bias_gradient]
            if layer or ctx.needs_input_grad[0]:
                gradient = gradient.to(ctx.dtype)
                if ctx.low_fused and weight.shape[0] >= _NARROW_OUTPUT:
                    gradient = _onednn_product(gradient, weight)
                else:
                    gradient = gradient @ weight
        if ctx.needs_input_grad[0]:
            input_gradient = gradient.to(ctx.input_dtype)
        return (input_gradient, None, None, None, *parameter_gradients)


def linear_stack(
    inputs: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
    *,
    relus: tuple[bool, ...],
    dtype: torch.dtype,
    float_last: bool = False,
) -> torch.Tensor:
    """Apply a sequence of linear layers to `inputs` [rows, in_features]. `parameters` alternates
    float32 weights [out, in] and biases (or None). Products and activations have `dtype`. With
    `float_last` the last product is float32, as logits need.
    """
    # torch.export and torch.compile fuse themselves and need plain operators. Check them first:
    # reading the row count would make it a constant in their result.
    plain = torch.compiler.is_compiling() or (
        not torch.is_grad_enabled() and inputs.shape[0] <= _FEW_ROWS
    )
    if not plain:
        return _LinearStack.apply(inputs, relus, dtype, float_last, *parameters)
    outputs = inputs.to(dtype)
    for layer, relu in enumerate(relus):
        layer_dtype = torch.float32 if float_last and layer == len(relus) - 1 else dtype
        weight = parameters[2 * layer]
        bias = parameters[2 * layer + 1]
        assert weight is not None
        # A cast to the same type takes time too, which counts for a single row
        if weight.dtype != layer_dtype:
            weight = weight.to(layer_dtype)
            bias = None if bias is None else bias.to(layer_dtype)
        if outputs.dtype != layer_dtype:
            outputs = outputs.to(layer_dtype)
        outputs = functional.linear(outputs, weight, bias)
        outputs = outputs.relu() if relu else outputs
    return outputs


def apply_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    relu: bool = False,
) -> torch.Tensor:
    """Apply one linear layer of `linear_stack` to `inputs` [..., in_features]. `weight` may have
    any strides.
    """
    # Exported programs of two dimensions keep no reshaping.
    rows = inputs if inputs.dim() == 2 else inputs.flatten(0, -2)
    outputs = linear_stack(rows, (weight, bias), relus=(relu,), dtype=dtype)
    return outputs if inputs.dim() == 2 else outputs.unflatten(0, inputs.shape[:-1])


def init_values(tensor: torch.Tensor, draw: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Fill the tensor in place with `draw` and return it. Skip the meta device, which has no
    values, and on which random operators import torch's compiler: 2 s at the start of every scoring
    command.
    """
    return tensor if tensor.is_meta else draw(tensor)


class UninitializedLinear(nn.Linear):
    """Linear layer without initialization, so that only the network draws from the generator."""

    def reset_parameters(self) -> None:
        pass


class MLP(nn.Module):
    """Linear layers with ReLU between them, [rows, in_features] to [rows, sizes[-1]]. With
    `final_activation` the last layer also has a ReLU, and the output has the precision's dtype.
    Otherwise the last layer is float32. Initial weights are N(0, sqrt(2 / (in + out))) and biases
    N(0, sqrt(1 / out)), from torch's generator (Naumov et al., DLRM, 2019).
    """

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        *,
        final_activation: bool,
        batch_norm: bool = False,
        dropout: float = 0.0,
        precision: Precision = "fp32",
    ) -> None:
        """`batch_norm` and `dropout`: before and after the ReLU of each layer except the last, as
        in FuxiCTR's MLP_Block.
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = sizes[-1] if sizes else in_features
        self.layers = nn.ModuleList()
        for out_features in sizes:
            layer = UninitializedLinear(in_features, out_features)
            init_values(
                layer.weight,
                partial(nn.init.normal_, std=(2.0 / (in_features + out_features)) ** 0.5),
            )
            init_values(layer.bias, partial(nn.init.normal_, std=(1.0 / out_features) ** 0.5))
            self.layers.append(layer)
            in_features = out_features
        self.norms = (
            nn.ModuleList(GlobalBatchNorm(size) for size in sizes[:-1]) if batch_norm else None
        )
        self.final_activation = final_activation
        self._dropout = dropout
        self._dtype = compute_dtype(precision)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # A slice of the ModuleList would be a new module in each step.
        layers = list(self.layers)
        hidden = inputs
        dropout = self._dropout if self.training else 0.0
        if self.norms is not None or dropout:
            for number, layer in enumerate(layers[:-1]):
                hidden = self._stack(hidden, [layer], relu=self.norms is None)
                hidden = hidden if self.norms is None else self.norms[number](hidden).relu()
                hidden = dropped(hidden, dropout)
            del layers[:-1]
        return self._stack(
            hidden, layers, relu=self.final_activation, float_last=not self.final_activation
        )

    def _stack(
        self, inputs: torch.Tensor, layers: list[nn.Module], *, relu: bool, float_last: bool = False
    ) -> torch.Tensor:
        """Apply layers. `relu`: whether the last of them has one. `float_last`: as in
        `linear_stack`.
        """
        parameters: list[Any] = [
            tensor for layer in layers for tensor in (layer.weight, layer.bias)
        ]
        relus = (True,) * (len(layers) - 1) + (relu,)
        return linear_stack(
            inputs, parameters, relus=relus, dtype=self._dtype, float_last=float_last
        )


# -- batch normalization over the global batch


@final
class GlobalBatchNorm(nn.Module):
    """Normalization by mean and variance over the rows of all workers, [rows, features] (Ioffe and
    Szegedy, 2015). Eval mode uses the running statistics, which are equal on all workers. A worker
    may have no rows. Arithmetic is float32, and the output has the input's dtype. torch's
    SyncBatchNorm does the same, but only on GPUs.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(
        self, features: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        """`affine`: whether to multiply each feature by a learned weight and add a learned bias."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self._eps = eps
        self._momentum = momentum

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._normalized(inputs.float()).to(inputs.dtype)

    def _normalized(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training or (num_workers() == 1 and len(inputs) >= _FEWEST_ROWS):
            return nn.functional.batch_norm(
                inputs,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self._momentum,
                self._eps,
            )
        ones = inputs.new_ones(1).mul_(len(inputs))
        # Two exchanges, for the mean and then the variance around it: a difference of squares would
        # lose digits.
        count, total = all_reduce_sum(ones, inputs.sum(0))
        count = count.detach().clamp(min=1)
        mean = total / count
        centered = inputs - mean
        (squares,) = all_reduce_sum(centered.square().sum(0))
        variance = squares / count
        with torch.no_grad():
            rate = self._momentum * (count >= _FEWEST_ROWS)
            self.running_mean.lerp_(mean, rate)
            self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), rate)
        normal = centered * torch.rsqrt(variance + self._eps)
        if self.weight is None or self.bias is None:
            return normal
        return normal * self.weight + self.bias


# Towers: linear layers with batch norm, activation and dropout, as in FuxiCTR's MLP_Block
def xavier_linear(in_features: int, out_features: int, *, bias: bool = True) -> UninitializedLinear:
    """Return a linear layer with Xavier normal weights and zero biases, as in FuxiCTR."""
    layer = UninitializedLinear(in_features, out_features, bias=bias)
    init_values(layer.weight, nn.init.xavier_normal_)
    if bias:
        init_values(layer.bias, nn.init.zeros_)
    return layer


@final
class Dice(nn.Module):
    """Activation p x + (1 - p) a x, with learned a, initially 0, and p the sigmoid of x normalized
    over all workers' rows. Source: Zhou et al., "Deep Interest Network for Click-Through Rate
    Prediction", KDD 2018.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = GlobalBatchNorm(features, eps=1e-9, momentum=0.01, affine=False)
        self.slope = nn.Parameter(torch.zeros(features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gate = self.norm(inputs.float()).sigmoid()
        return (inputs * (gate + (1 - gate) * self.slope)).to(inputs.dtype)


class TowerSettings(TypedDict, total=False):
    """Optional settings of a `Tower`."""

    dropout: float
    batch_norm: bool
    precision: Precision


@final
class Tower(nn.Module):
    """Linear layers, each with batch norm, activation and dropout, [rows, in_features] to [rows,
    sizes[-1]]. Products and activations have the precision's dtype. Without sizes, returns its
    input.
    """

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        activation: Literal["relu", "dice"] = "relu",
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        self.activations = nn.ModuleList()
        for size in sizes:
            self.layers.append(xavier_linear(in_features, size))
            self.norms.append(GlobalBatchNorm(size) if batch_norm else nn.Identity())
            self.activations.append(Dice(size) if activation == "dice" else nn.ReLU())
            in_features = size
        self.out_features = in_features
        self._is_plain = bool(sizes) and not batch_norm and activation == "relu"
        self._dropout = dropout
        self._dtype = compute_dtype(precision)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.to(self._dtype)
        dropout = self._dropout if self.training else 0.0
        if self._is_plain and not dropout:
            parameters = [
                layer.get_parameter(name) for layer in self.layers for name in ("weight", "bias")
            ]
            relus = (True,) * len(self.layers)
            return linear_stack(hidden, parameters, relus=relus, dtype=self._dtype)
        for layer, norm, activation in zip(self.layers, self.norms, self.activations, strict=True):
            assert isinstance(layer, UninitializedLinear)
            linear = apply_linear(hidden, layer.weight, layer.bias, dtype=self._dtype)
            hidden = dropped(activation(norm(linear)), dropout)
        return hidden


@final
class LogitTower(nn.Module):
    """`Tower` with a linear layer to one logit, [rows, in_features] to float32 [rows]."""

    def __init__(
        self, in_features: int, sizes: Sequence[int], **settings: Unpack[TowerSettings]
    ) -> None:
        super().__init__()
        self.tower = Tower(in_features, sizes, **settings)
        self.logit = xavier_linear(self.tower.out_features, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logit(self.tower(inputs).float()).squeeze(1)


@final
class Experts(nn.Module):
    """Towers of equal form, [rows, in_features] to [rows, count, sizes[-1]] in the precision's
    dtype.
    """

    def __init__(
        self, in_features: int, sizes: Sequence[int], count: int, **settings: Unpack[TowerSettings]
    ) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower(in_features, sizes, **settings) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(inputs) for tower in self.towers], dim=1)


@final
class Gate(nn.Module):
    """Weighted sum of experts' outputs, with weights from a tower, a linear layer and a softmax
    over the gate's input.
    """

    def __init__(
        self, in_features: int, sizes: Sequence[int], count: int, **settings: Unpack[TowerSettings]
    ) -> None:
        super().__init__()
        self.tower = Tower(in_features, sizes, **settings)
        self.scores = xavier_linear(self.tower.out_features, count)

    def forward(self, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum in the experts' dtype, [rows, width]. `experts`: [rows, count,
        width].
        """
        weights = self.scores(self.tower(inputs).float()).softmax(1).to(experts.dtype)
        return (weights.unsqueeze(1) @ experts).squeeze(1)
