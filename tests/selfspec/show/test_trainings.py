"""What trainings tell beside their parts, as frames."""

from __future__ import annotations

import json

import pytest

from selfspec.basics.errors import SelfspecError
from selfspec.show.trainings import learning_frame, place_frame, read_trainings


def told(kind, **other):
    how = {"model": "m", "machine": "none", "threads": 1, "texts": 20, "tokens": 900, "steps": 40, "seconds": 120.0}
    found = {"tokens_per_pass": 1.5, "acceptance": [0.4, 0.1], "history": [[0.0, 1.0], [120.0, 1.5]]}
    return json.dumps({"kind": kind} | how | found | other)


def test_all_of_a_folder(tmp_path):
    for kind in ("medusa", "eagle"):
        (tmp_path / f"{kind}.json").write_text(told(kind))
    trainings = read_trainings(tmp_path)
    assert [of.kind for of in trainings] == ["eagle", "medusa"]
    learning = learning_frame(trainings)
    assert learning[learning["kind"] == "eagle"]["minutes"].tolist() == [0.0, 2.0]
    assert learning["tokens_per_pass"].tolist() == [1.0, 1.5] * 2
    assert place_frame(trainings[:1]).to_dict("list") == {
        "kind": ["eagle", "eagle"],
        "place": [1, 2],
        "acceptance": [0.4, 0.1],
    }
    assert read_trainings(tmp_path / "eagle.json") == trainings[:1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (told("eagle", acceptance=[2.0]), "acceptance.0: Input should be less than or equal to 1"),
        ("[]", "it: Input should be an object"),
        ("{", "it: Invalid JSON"),
    ],
)
def test_what_is_no_training(tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SelfspecError, match=f"not what selfspec train writes \\({said}"):
        read_trainings(tmp_path / "a.json")


def test_a_folder_without_any(tmp_path):
    with pytest.raises(SelfspecError, match="holds no .json file of a training"):
        read_trainings(tmp_path)
