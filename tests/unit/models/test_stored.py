"""Loading of stored configurations, which may only select networks of rayrec."""

import pytest

from rayrec import models, recipes
from rayrec.config import InputError
from rayrec.models.base import ClickModelConfig, stored_model
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.finalnet import FinalNetConfig


class OwnConfig(ClickModelConfig):
    pass


def test_stored_model_restores_settings() -> None:
    for model in (DLRMConfig(cross_layers=2), FinalNetConfig(first_tower=(8,))):
        assert stored_model(model.to_dict(), where="f") == model
    own = OwnConfig(embedding_dim=3)
    found = stored_model(own.to_dict(), where="f", own=OwnConfig)
    assert (type(found), found) == (OwnConfig, own)


@pytest.mark.parametrize(
    "name",
    [
        f"{__name__}.OwnConfig",
        "FinalNetConfig",
        "os.system",
        "this.Zen",  # Importing it prints
        "rayrec.models.ranking.finalnet.FinalNet",
        "rayrec.models.ranking.dlrm.ClickModelConfig",  # Imported there, but builds nothing
        "rayrec.models.ranking.dlrm.InputError",
        "rayrec.models.ranking..finalnet.FinalNetConfig",
        7,
        ["a"],
    ],
)
def test_stored_model_rejects_other_classes(name: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^f: network must be rayrec's, got .*\. Pass its training recipe"):
        stored_model({"class": name, "embedding_dim": 4}, where="f")
    assert capsys.readouterr().out == ""


def test_stored_class_replaces_recipe_class() -> None:
    """By model name or stored class path. Keeps the settings that all click models share."""
    recipe = recipes.criteo_demo()
    model = recipe.replace(workload={"model": {"class": "finalnet", "first_tower": [8]}}).workload.model
    assert model == FinalNetConfig(embedding_dim=16, embedding_penalty=3e-4, first_tower=(8,))
    changed = recipe.replace(workload={"model": FinalNetConfig(members=2)})
    assert recipes.load_config(changed.to_yaml()) == changed
    back = changed.replace(workload={"model": {"class": "dlrm"}}).workload.model
    assert back == DLRMConfig(embedding_dim=16, bottom_mlp=(512, 256, 16), members=2)
    for unknown in ("deepest", "os.system", "rayrec.models.base.ClickModelConfig"):
        with pytest.raises(InputError, match=rf"model\.class: .*; rayrec's models are {', '.join(models.names())}"):
            recipe.replace(workload={"model": {"class": unknown}})


def test_every_file_in_families_is_model() -> None:
    for name in models.names():
        cls = models.config_class(name)
        assert cls is not None, name
        assert models.config_class(f"{cls.__module__}.{cls.__qualname__}") is cls
        assert issubclass(cls, ClickModelConfig)
        cls()  # Every field has a default
