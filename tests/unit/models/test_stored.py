"""A file chooses among rayrec's own networks, and no other code."""

from __future__ import annotations

import pytest

from rayrec.config import InputError
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.models.stored import stored_model


class OwnConfig(ClickModelConfig):
    pass


def test_settings_are_those_that_were_stored() -> None:
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
        "this.Zen",  # printed by importing it
        "rayrec.models.ranking.finalnet.FinalNet",
        "rayrec.models.ranking.dlrm.ClickModelConfig",  # imported there, but builds nothing
        "rayrec.models.ranking.dlrm.InputError",
        "rayrec.models.ranking..finalnet.FinalNetConfig",
        7,
        ["a"],
    ],
)
def test_a_file_chooses_no_other_class(name: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^f: its network is .*, which is not one of rayrec's; give the recipe"):
        stored_model({"class": name, "embedding_dim": 4}, where="f")
    assert capsys.readouterr().out == ""
