"""The manifests for Kubernetes: what they say to rayrec and to Ray Serve is accepted by these, and
they fit together.

RAYREC_CRDS=FOLDER with KubeRay's CRDs (`ray-operator/config/crd/bases` of its repository) also
validates against those.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from builders.scripts import script
from hosts.dockerfile import Instruction, ignored, instructions
from ray._common.utils import import_attr
from ray._private import ray_constants
from ray.serve.schema import ServeDeploySchema

from rayrec.cli.parser import parse
from rayrec.commands import COMMANDS
from rayrec.inference.config import ComparisonGates
from rayrec.prepare.validate import Gates
from rayrec.recipes import load_config
from rayrec.serve import listener, server
from rayrec.serve.config import ServerConfig
from rayrec.serve.deployment import APPLICATION, build_application, read_user_config
from rayrec.serve.shutdown import STOPPED
from rayrec.workloads.base import TrainConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
CRDS = os.environ.get("RAYREC_CRDS")
FILES = {
    "RayCluster": "cluster/raycluster",
    "RayJob": "train/rayjob",
    "RayService": "serve/rayservice",
}


def _manifest(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{FILES[kind]}.yaml").read_text())
    assert found["kind"] == kind
    return found


def _cluster(kind: str) -> dict[str, Any]:
    spec = _manifest(kind)["spec"]
    found: dict[str, Any] = {"RayCluster": spec, "RayJob": spec.get("rayClusterSpec")}.get(
        kind
    ) or spec["rayClusterConfig"]
    return found


def _pods(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    cluster = _cluster(kind)
    yield "head", cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group


def test_every_manifest_is_in_kustomization() -> None:
    listed = set()
    for file in FOLDER.rglob("kustomization.yaml"):
        content = yaml.safe_load(file.read_text())
        assert content["namespace"] == "rayrec", file
        generated = [
            name for made in content.get("configMapGenerator", ()) for name in made["files"]
        ]
        for resource in (*content["resources"], *generated):
            assert (file.parent / resource).exists(), (file, resource)
            listed.add((file.parent / resource).resolve())
    assert {
        path.resolve() for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml"
    } <= listed


def _config_of_the_job() -> TrainConfig:
    words = shlex.split(_manifest("RayJob")["spec"]["entrypoint"])
    assert words[:2] == ["rayrec", "train"]
    return parse(COMMANDS["train"], words[2:]).arguments[0]


def test_job_command_and_cluster_match_manifests() -> None:
    config = _config_of_the_job()
    assert config.name == _manifest("RayJob")["metadata"]["name"] == "nightly-DATE"
    trainers = dict(_pods("RayJob"))["trainers"]
    assert config.scaling.resources_per_worker == yaml.safe_load(
        yaml.safe_load(trainers["rayStartParams"]["resources"])
    )
    assert config.scaling.num_workers == (1, trainers["maxReplicas"])
    cpus = trainers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    assert config.scaling.cpus_per_worker is not None
    assert config.scaling.cpus_per_worker <= float(cpus)
    assert _cluster("RayCluster") == _cluster("RayJob")


@pytest.mark.parametrize("kind", FILES)
def test_pods_have_image_credentials_and_resources(kind: str) -> None:
    for name, group in _pods(kind):
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        assert container["image"] == "rayrec", "what kustomizations replace"
        assert container["envFrom"] == [{"secretRef": {"name": "store", "optional": True}}], (
            "credentials of a store"
        )
        assert spec["serviceAccountName"] == "rayrec"
        assert "metrics" in {port["name"] for port in container["ports"]}, (
            "what the PodMonitor scrapes"
        )
        assert container["resources"]["requests"] == container["resources"]["limits"]
        pool = spec["nodeSelector"]["rayrec/pool"]
        assert {toleration["value"] for toleration in spec.get("tolerations", [])} == {pool} - {
            "on-demand"
        }, name
        if name == "head":
            assert pool == "on-demand"
            assert group["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("kind", FILES)
def test_cluster_has_token_and_installed_versions(kind: str) -> None:
    assert _cluster(kind)["rayVersion"] == version("ray")
    assert _cluster(kind)["authOptions"] == {"mode": "token"}
    (image,) = yaml.safe_load((FOLDER / FILES[kind]).with_name("kustomization.yaml").read_text())[
        "images"
    ]
    assert image["newTag"] == version("rayrec")


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob"])
def test_leaving_trainer_has_time_for_notice(kind: str) -> None:
    spec = dict(_pods(kind))["trainers"]["template"]["spec"]
    (variable,) = spec["containers"][0]["env"]
    assert variable["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert hasattr(ray_constants, variable["name"]), "Ray knows it"
    assert (
        _config_of_the_job().failure.grace_s
        < float(variable["value"])
        < spec["terminationGracePeriodSeconds"]
    )


def test_serve_configuration_and_service_names_are_valid() -> None:
    checked = ServeDeploySchema.model_validate(
        yaml.safe_load(_manifest("RayService")["spec"]["serveConfigV2"])
    )
    (application,) = checked.applications
    assert application.import_path == "rayrec.serve:build"
    (deployment,) = application.deployments
    assert deployment.name == APPLICATION
    assert read_user_config(deployment.user_config).model == application.args["model"]
    groups = dict(_pods("RayService"))
    autoscaling = application.args["autoscaling"]
    cpus = float(
        groups["replicas"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    )
    assert (
        autoscaling["max_replicas"] * application.args["cpus_per_replica"]
        <= cpus * groups["replicas"]["maxReplicas"]
    )
    config = build_application(application.args)._bound_deployment.init_args[0]
    service = f"{_manifest('RayService')['metadata']['name']}-serve-svc"
    namespace = "rayrec"
    for name in (
        f"{service}:8000",
        f"{service}.{namespace}",
        f"{service}.{namespace}.svc.cluster.local",
        "10.8.0.1:8000",
    ):
        assert config.is_allowed_host(name), (
            "also of a pod's address, which probes and Prometheus use"
        )
    assert not config.is_allowed_host("evil.example")
    for _, group in _pods("RayService"):
        (variable,) = group["template"]["spec"]["containers"][0]["env"]
        assert variable["name"] == server.PROXY_CALLBACK_VARIABLE
        assert import_attr(variable["value"]) is listener.bound_proxy


@pytest.mark.parametrize("kind", FILES)
def test_pods_run_restricted(kind: str) -> None:
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    specs = {name: group["template"]["spec"] for name, group in _pods(kind)}
    if kind == "RayJob":
        specs["submitter"] = _manifest(kind)["spec"]["submitterPodTemplate"]["spec"]
    for name, spec in specs.items():
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }, name
        assert spec["serviceAccountName"] == "rayrec"
        assert [container["securityContext"] for container in spec["containers"]] == [restricted], (
            name
        )
        # Only an autoscaler asks Kubernetes for anything.
        autoscales = name == "head" and _cluster(kind).get("enableInTreeAutoscaling", False)
        assert spec.get("automountServiceAccountToken", False) is autoscales
    if "autoscalerOptions" in _cluster(kind):
        assert _cluster(kind)["autoscalerOptions"]["securityContext"] == restricted
    assert (
        yaml.safe_load((FOLDER / "common" / "account.yaml").read_text())[
            "automountServiceAccountToken"
        ]
        is False
    )


def test_network_policies_open_known_ports() -> None:
    """To pods that are not Ray's: the dashboard and metrics to some, requests to all, nothing
    else.
    """
    opened = {}
    for file in ("common/network.yaml", "serve/network.yaml"):
        policy = yaml.safe_load((FOLDER / file).read_text())
        assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
        assert policy["spec"]["podSelector"] == {"matchLabels": {"ray.io/is-ray-node": "yes"}}
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            if rule.get("from") == [{"podSelector": policy["spec"]["podSelector"]}]:
                assert "ports" not in rule
                continue
            (port,) = rule["ports"]
            opened[port["port"]] = bool(rule.get("from"))
    containers = [group["template"]["spec"]["containers"][0] for _, group in _pods("RayService")]
    ports = {
        port["name"]: port["containerPort"]
        for container in containers
        for port in container["ports"]
    }
    assert opened == {ports["dashboard"]: True, ports["metrics"]: True, ports["serve"]: False}


def test_minio_has_matching_ports_and_labels() -> None:
    [stateful], [service], [policy] = (
        _objects(f"minio/{name}.yaml").values() for name in ("statefulset", "service", "network")
    )
    template = stateful["spec"]["template"]
    labels = {"app.kubernetes.io/name": "minio"}
    assert (
        template["metadata"]["labels"]
        == stateful["spec"]["selector"]["matchLabels"]
        == service["spec"]["selector"]
        == labels
    )
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"] == "minio"
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (opened,) = service["spec"]["ports"]
    assert (opened["port"], opened["targetPort"]) == (ports["s3"], "s3")
    assert (
        f"AWS_ENDPOINT_URL=http://minio.rayrec:{opened['port']}"
        in (FOLDER.parents[1] / "docs" / "stores.md").read_text()
    )
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": ports["s3"]}]
    nightly = _objects("nightly/cronjob.yaml")["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]
    ray_result, client_labels = (one["podSelector"]["matchLabels"] for one in rule["from"])
    assert ray_result == {"ray.io/is-ray-node": "yes"}
    assert all(
        client_labels.items() <= pod["metadata"]["labels"].items()
        for pod in (PLAIN["spec"]["template"], nightly)
    )


def test_minio_container_uses_secret_volume_and_no_privileges() -> None:
    (stateful,) = _objects("minio/statefulset.yaml").values()
    template = stateful["spec"]["template"]
    (container,) = template["spec"]["containers"]
    keys = [variable["valueFrom"]["secretKeyRef"] for variable in container["env"]]
    assert keys == [
        {"name": "store", "key": key} for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    ]
    (volume,) = stateful["spec"]["volumeClaimTemplates"]
    assert container["volumeMounts"] == [
        {"name": volume["metadata"]["name"], "mountPath": container["args"][1]}
    ]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True


def _strict(schema: Any) -> Any:
    """The same schema, in which a field that it does not name is an error, as it is to `kubectl
    --validate=strict`.
    """
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _strict(part) for key, part in schema.items()}
    open_ = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ and schema.get("type") == "object":
        changed["additionalProperties"] = False
    return changed


@pytest.mark.exhaustive
@pytest.mark.skipif(CRDS is None, reason="RAYREC_CRDS names no folder with KubeRay's CRDs")
@pytest.mark.parametrize("kind", FILES)
def test_manifests_match_kuberay_schema(kind: str) -> None:
    assert CRDS is not None
    definition = yaml.load(
        (Path(CRDS) / f"ray.io_{kind.lower()}s.yaml").read_text(), yaml.CSafeLoader
    )
    (schema,) = (
        one["schema"]["openAPIV3Schema"]
        for one in definition["spec"]["versions"]
        if one["name"] == "v1"
    )
    schema = _strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    found = _manifest(kind)
    jsonschema.validate(found, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "spec": {**found["spec"], "backoffLimits": 3}}, schema)


# -- Servers without KubeRay, monitoring and the nightly job
def _objects(file: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / file).read_text())}


PLAIN = _objects("serve-plain/deployment.yaml")["Deployment"]


def test_named_metrics_alerts_and_pods_exist() -> None:
    files = [*(ROOT / "deploy").rglob("*"), *(ROOT / "docs").rglob("*.md")]
    texts = [file.read_text() for file in files if file.suffix in (".json", ".yaml", ".md")]
    named = {
        name for text in texts for name in re.findall(r"\b(?:ray_rayrec|rayrec_serve)_\w+", text)
    }
    known = set(
        re.findall(r"^\| `(\w+)`", script("tools", "reference").metrics_page(), re.MULTILINE)
    )
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    assert {name for name in known if "_serve_" in name} <= named <= known
    runbook = (ROOT / "docs" / "operate-serving.md").read_text()
    groups = _objects("monitoring/rules.yaml")["PrometheusRule"]["spec"]["groups"]
    assert [
        rule["alert"]
        for group in groups
        for rule in group["rules"]
        if f"| `{rule['alert']}` |" not in runbook
    ] == []
    monitor = _objects("monitoring/serving.yaml")["PodMonitor"]["spec"]
    for template in (
        PLAIN["spec"]["template"],
        *(group["template"] for _, group in _pods("RayService")),
    ):
        assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert monitor["podMetricsEndpoints"][0]["port"] in ports


def test_rules_fit_plain_prometheus() -> None:
    spec = _objects("monitoring/rules.yaml")["PrometheusRule"]["spec"]
    assert list(spec) == ["groups"]  # The only key of a rule file, whose rules have these keys
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    assert {key for rule in rules for key in rule} == {
        "alert",
        "expr",
        "for",
        "labels",
        "annotations",
    }
    assert "take `spec.groups`" in " ".join(
        (ROOT / "docs" / "operate-serving.md").read_text().split()
    )


def test_stop_of_starting_server_is_no_failure_to_systemd() -> None:
    unit = (ROOT / "deploy" / "systemd" / "rayrec-serve.service").read_text()
    assert f"SuccessExitStatus={STOPPED}" in unit.splitlines()


def test_server_command_fits_deployment() -> None:
    (container,) = PLAIN["spec"]["template"]["spec"]["containers"]
    call = parse(COMMANDS["serve"], [*container["command"], *container["args"]][2:])
    config = ServerConfig().updated(
        {name: value for name, value in call.keywords.items() if name != "model"}
    )
    assert (config.host, config.port, config.ingress) == (
        "0.0.0.0",
        container["ports"][0]["containerPort"],
        "direct",
    )
    assert config.replicas * config.cpus_per_replica <= float(
        container["resources"]["limits"]["cpu"]
    )
    service = _objects("serve-plain/service.yaml")["Service"]
    assert (
        service["spec"]["selector"].items()
        <= PLAIN["spec"]["template"]["metadata"]["labels"].items()
    )
    assert config.is_allowed_host(f"{service['metadata']['name']}.rayrec:{config.port}")
    target = _objects("serve-plain/scaling.yaml")["HorizontalPodAutoscaler"]["spec"][
        "scaleTargetRef"
    ]
    assert target["name"] == PLAIN["metadata"]["name"]
    unit = (ROOT / "deploy" / "systemd" / "rayrec-serve.service").read_text()
    arguments = shlex.split(re.findall(r"exec \S+/rayrec serve (.+)'$", unit, re.MULTILINE)[0])
    assert parse(COMMANDS["serve"], arguments).keywords["port"]


def test_nightly_settings_are_valid_and_swap_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (ROOT / "deploy", FOLDER):
        job = yaml.safe_load((folder / "nightly" / "nightly.yaml").read_text())
        assert Gates(**job["gates"]) != Gates()
        assert ComparisonGates(**job["comparison"]) != ComparisonGates()
        assert load_config(yaml.safe_dump(job["train"])).workload.schema.label == "click"
    swap = script("deploy/nightly", "swap")
    called = list[Any]()
    versions = ["old", None, "new", "new", "old"]
    objects = {"deployments/rayrec-serve": PLAIN, "rayservices/rayrec": _manifest("RayService")}
    rules = _objects("nightly/account.yaml")["Role"]["rules"]
    assert [f"{rule['resources'][0]}/{rule['resourceNames'][0]}" for rule in rules] == [*objects]
    (tmp_path / "namespace").write_text("rayrec\n")
    monkeypatch.setattr(swap, "ACCOUNT", tmp_path)
    monkeypatch.setattr(swap, "open_served", lambda export: SimpleNamespace(version="new"))
    monkeypatch.setattr(
        swap,
        "call",
        lambda path, *patch: called.append(patch) or objects["/".join(path.split("/")[-2:])],
    )
    monkeypatch.setattr(swap, "version_at", lambda url: versions.pop(0))
    for name in objects:
        swap.main(name, "http://s", "s3://b/e", pause_s=0)
    (_, (first, _), _, (second, _)) = called
    assert first["spec"]["template"]["spec"]["containers"][0]["env"] == [
        {"name": "MODEL", "value": "s3://b/e"}
    ]
    (application,) = yaml.safe_load(second["spec"]["serveConfigV2"])["applications"]
    assert application["deployments"][0]["user_config"]["model"] == "s3://b/e"
    with pytest.raises(SystemExit, match="serves old, not new"):
        swap.main("rayservices/rayrec", "http://s", "s3://b/e", wait_s=-1)


# -- Dockerfile
RULES = (ROOT / ".dockerignore").read_text()
STEPS = instructions((ROOT / "deploy" / "Dockerfile").read_text())


def _rests(word: str) -> list[str]:
    return [step.rest for step in STEPS if step.word == word]


def _last_stage() -> list[Instruction]:
    return STEPS[max(number for number, step in enumerate(STEPS) if step.word == "FROM") :]


def test_instructions_are_read() -> None:
    assert instructions("# a\nFROM x AS y\nRUN a \\\n # in between\n && b\n\ncopy c d\n") == [
        Instruction("FROM", "x AS y"),
        Instruction("RUN", "a && b"),
        Instruction("COPY", "c d"),
    ]


def test_build_context_leaves_out_builds_and_tests() -> None:
    kept = ["src/rayrec/cli.py", "requirements.lock"]
    left = [
        "src/rayrec/native/_kernels.abi3.so",
        "src/rayrec/__pycache__",
        "src/rayrec/__pycache__/cli.pyc",
        ".git/config",
        "src/rayrec.egg-info/PKG-INFO",
        "tests/conftest.py",
        ".venv",
    ]
    assert [path for path in (*kept, *left) if not ignored(path, RULES)] == kept


def test_image_runs_demo_unprivileged() -> None:
    stage = _last_stage()
    (user,) = (step.rest for step in stage if step.word == "USER")
    assert int(user) > 0  # a number, so that Kubernetes can tell that it is not root's
    after = [step.word for step in stage[[step.word for step in stage].index("USER") :]]
    assert "RUN" not in after
    (command,) = (json.loads(step.rest) for step in stage if step.word == "CMD")
    assert f"deploy/run-mode.sh /opt/rayrec/bin/{command[0]}" in _rests("COPY")


def test_image_has_no_compiler_and_no_package_lists() -> None:
    assert not any("gcc" in step.rest for step in _last_stage())
    assert all(
        "rm -rf /var/lib/apt/lists/*" in rest for rest in _rests("RUN") if "apt-get install" in rest
    )


@pytest.mark.parametrize(
    ("extras", "text"),
    [
        pytest.param("onnx", "\nonnxruntime", id="known"),
        pytest.param("onnx,x", "EXTRAS: rayrec has no x, but spark, ", id="unknown"),
    ],
)
def test_image_lists_packages_of_extras(extras: str, text: str) -> None:
    (listing,) = (part for step in _rests("RUN") for part in step.split("&&") if "tomllib" in part)
    listing = listing.replace("/opt/rayrec/bin/python", sys.executable).replace(
        "/needed.txt", "/dev/stdout"
    )
    assert text in subprocess.getoutput(f"cd '{ROOT}'; BUILD=cpu EXTRAS={extras}; {listing}")


def test_mode_selects_recipe_data_and_output(tmp_path: Path) -> None:
    (tmp_path / "rayrec").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "rayrec").chmod(0o755)
    script = ROOT / "deploy" / "run-mode.sh"
    assert os.access(script, os.X_OK)
    common = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def lines(*flags: str, **variables: str) -> list[str]:
        done = subprocess.run(
            [script, *flags], env=common | variables, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    train = "train criteo_demo --train-data.path log/train.txt --storage-path runs --name demo"
    assert lines() == ["generate log --rows 100000 --seed 0", train]
    (kaggle,) = lines("--epochs", "2", RUN_MODE="kaggle")
    assert kaggle == (
        "train criteo_kaggle --train-data.path /data --storage-path runs --name kaggle --epochs 2"
    )
    (full,) = lines(RUN_MODE="criteo_full", DATA_DIR="/logs", OUTPUT_DIR="/out", RUN_NAME="first")
    assert full == "train criteo_full --train-data.path /logs --storage-path /out --name first"


def test_image_has_locked_versions() -> None:
    installs = [rest for rest in _rests("RUN") if "pip install" in rest]
    assert installs
    assert all("--constraint requirements.lock" in rest for rest in installs)
    assert not any("latest" in rest for rest in [*_rests("FROM"), *_rests("ARG")])


def test_image_copies_existing_files() -> None:
    names = {rest.split(" AS ")[1] for rest in _rests("FROM") if " AS " in rest}
    copied = set()
    for rest in _rests("COPY"):
        *sources, _ = rest.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in names
            continue
        copied |= set(sources)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert not ignored(source, RULES), source
    # and nothing else is sent
    assert copied == {line[1:] for line in RULES.splitlines() if line.startswith("!")}
