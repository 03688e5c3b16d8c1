"""What is read by `datasets`: parquet files, folders, and sets of the hub, which a local file stands for here."""

from __future__ import annotations

import datasets
import huggingface_hub
import pyarrow as pa
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import OfflineModeIsEnabled
from pyarrow import parquet
from selfspec.search.continuations import choose

from selfspec.basics import machine as the_hub
from selfspec.basics.errors import SelfspecError
from selfspec.cli.input_options import _KINDS
from selfspec.text import datasets_prompts
from selfspec.text.prompt_files import read_prompts


def table(path, **columns):
    parquet.write_table(pa.table(columns), path, row_group_size=1000)
    return path


class TestParquet:
    def test_the_usual_columns(self, tmp_path):
        assert read_prompts(table(tmp_path / "a.parquet", text=["t"], prompt=["p"])).texts == ("p",)
        assert read_prompts(table(tmp_path / "b.PARQUET", text=["2020-01-01", "é\n"])).texts == ("2020-01-01", "é\n")

    def test_a_column_and_a_template(self, tmp_path):
        path = table(
            tmp_path / "a.parquet", q=["one", None, " ", "two"], n=[1, 2, 3, 4], turns=[["x", "y"], [], None, ["z"]]
        )
        found = read_prompts(path, column="q", template="{n}. {q}?\n")
        assert found.texts == ("1. one?\n", "4. two?\n")
        assert (found.source, found.column, found.template) == ("a.parquet", "q", "{n}. {q}?\n")
        assert read_prompts(path, column="turns").texts == ("x", "z")

    def test_only_the_first_rows_of_a_long_file(self, tmp_path):
        path = table(tmp_path / "long.parquet", prompt=[str(i) for i in range(3 * datasets_prompts.ROWS)])
        found = read_prompts(path)
        assert found.texts == tuple(str(i) for i in range(datasets_prompts.ROWS))
        assert found.note == f"{path}: not used: all rows after the first {datasets_prompts.ROWS}"
        assert len(read_prompts(path, use="all").texts) == 3 * datasets_prompts.ROWS
        gaps = read_prompts(table(tmp_path / "gaps.parquet", prompt=["a", None, "c", ""]))
        assert (gaps.texts, gaps.note) == (("a", "c"), f"{tmp_path / 'gaps.parquet'}: not used: 2 rows without text")

    def test_columns_that_are_not_asked_for_are_not_looked_at(self, tmp_path):
        """An image that cannot be decoded does no harm."""
        features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
        rows = {"prompt": ["p"], "image": [{"bytes": b"no image", "path": None}]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
        assert read_prompts(tmp_path / "a.parquet").texts == ("p",)

    def test_brackets_in_a_name_are_no_pattern(self, tmp_path):
        (tmp_path / "[1] *").mkdir()
        assert read_prompts(table(tmp_path / "[1] *" / "a?[b].parquet", prompt=["p"])).texts == ("p",)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, r"a\.parquet: no column 'prompt', 'text' or 'messages' \(there are: q, n, image\); name another"),
            ({"column": "x"}, r"a\.parquet: no column 'x' \(there are"),
            ({"template": "{q}{x}"}, r"a\.parquet: no column 'x' \(there are"),
            ({"column": "n"}, r"a\.parquet: holds no prompts; expected rows whose 'n' is a text"),
            ({"column": "image"}, r"holds no prompts; expected rows whose 'image' is a text"),
            ({"template": "{q}{image}"}, r"holds no prompts; expected rows whose 'q' and 'image' are texts"),
        ],
    )
    def test_wrong_columns(self, tmp_path, options, message):
        path = table(tmp_path / "a.parquet", q=["one"], n=[1], image=[b"x"])
        with pytest.raises(SelfspecError, match=message):
            read_prompts(path, **options)

    def test_wrong_files(self, tmp_path, capfd):
        path = table(tmp_path / "a.parquet", prompt=["long enough " * 99] * 50)
        right = path.read_bytes()
        for content in (b"", b"PAR1", b"text", right[:-20], right[:8] + bytes(40) + right[48:]):
            path.write_bytes(content)
            with pytest.raises(SelfspecError, match=r"a\.parquet: not a parquet file that can be read \(") as refused:
                read_prompts(path)
            assert "\n" not in str(refused.value)
        assert capfd.readouterr() == ("", "")
        with pytest.raises(SelfspecError, match=r"no\.parquet: no such file"):
            read_prompts(tmp_path / "no.parquet")
        with pytest.raises(SelfspecError, match=r"a\.parquet: holds no prompts"):
            read_prompts(table(path, prompt=pa.array([], pa.string())))


class TestFolder:
    def test_every_text_file_is_a_prompt(self, tmp_path):
        folder = tmp_path / "texts"
        files = {
            "b.txt": "b\r\n\nb",
            "a.md": "\ufeffa",
            "sub/c [1].PY": "c",
            "sub/deep/d*.rs": "d",
            "empty.py": "",
            ".hidden.txt": "hidden",
            ".git/e.txt": "hidden",
            "f.bin": "no text",
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
        found = read_prompts(folder)
        assert (found.source, found.texts) == ("texts", ("a", "b\n\nb", "c", "d"))
        assert read_prompts(folder, template="<{text}>").texts[0] == "<a>"

    def test_wrong_folders(self, tmp_path):
        with pytest.raises(SelfspecError, match=r"holds no prompts; expected text files \(\.txt \.md "):
            read_prompts(tmp_path)
        (tmp_path / "a.txt").write_text("a")
        with pytest.raises(SelfspecError, match=r"no column 'prompt' \(there are: text\)"):
            read_prompts(tmp_path, column="prompt")
        (tmp_path / "b.py").write_bytes(b"caf\xe9")
        with pytest.raises(SelfspecError, match=r"b\.py: not UTF-8 text \(byte 3\)"):
            read_prompts(tmp_path)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one data set: what was asked of it; the answer is a local file, or an error."""
    asked = []
    real = datasets.load_dataset

    def answer(columns=None, error=None):
        def load_dataset(path, name=None, *, split, revision=None, streaming, **options):
            if options:
                return real(path, split=split, streaming=streaming, **options)
            asked.append((path, name, split, revision, streaming))
            if error is not None:
                raise error
            file = table(tmp_path / "hub.parquet", **columns)
            return real("parquet", data_files=str(file), split="train", streaming=True)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return answer


COLUMNS = {
    "cnn_dailymail": {"article": ["News."], "highlights": ["N."], "id": ["1"]},
    "xsum": {"document": ["News."], "summary": ["N."], "id": ["1"]},
    "gsm8k": {"question": ["1 + 1?"], "answer": ["2"]},
    "humaneval": {"task_id": ["0"], "prompt": ["def f():\n"], "canonical_solution": ["    pass"]},
    "mt_bench": {"category": ["w"], "prompt": [["Write.", "Rewrite."]], "prompt_id": [1]},
}
EXPECTED = {
    "cnn_dailymail": (("abisee/cnn_dailymail", "3.0.0", "train", None, True), "Article: News.\nSummary:"),
    "xsum": (
        ("EdinburghNLP/xsum", None, "train", "refs/convert/parquet", True),
        "Article: News.\nSummary in one sentence:",
    ),
    "gsm8k": (("openai/gsm8k", "main", "train", None, True), "Question: 1 + 1?\nAnswer:"),
    "humaneval": (("openai/openai_humaneval", None, "test", None, True), "def f():\n"),
    "mt_bench": (("HuggingFaceH4/mt_bench_prompts", None, "train", None, True), "Write."),
}


class TestPresets:
    @pytest.mark.parametrize("name", datasets_prompts.PRESETS)
    def test_what_is_read(self, hub, name):
        asked = hub(COLUMNS[name])
        found = read_prompts(name)
        assert (asked, found.texts) == ([EXPECTED[name][0]], (EXPECTED[name][1],))
        assert found.source == " ".join(part for part in EXPECTED[name][0][:3] if part)

    def test_others_are_held_out_where_there_are_others(self, hub):
        asked = hub(COLUMNS["gsm8k"])
        read_prompts("gsm8k", held_out=True)
        assert asked[0][2] == "test"

    def test_no_more_is_read_than_wanted(self, hub):
        hub({"question": ["1 + 1?", ""]})
        assert read_prompts("gsm8k", column="question", use="every", limit=1).texts == ("1 + 1?",)
        with pytest.raises(SelfspecError, match="row 2"):
            read_prompts("gsm8k", column="question", use="every")

    def test_another_column_or_template(self, hub):
        hub(COLUMNS["gsm8k"])
        assert read_prompts("gsm8k", column="answer").texts == ("2",)
        assert read_prompts("gsm8k", template="{question} {answer}").texts == ("1 + 1? 2",)
        with pytest.raises(SelfspecError, match=r"gsm8k: no column 'x' \(there are: question, answer\)"):
            read_prompts("gsm8k", column="x")

    def test_few_rows_are_read_and_the_choice_is_seeded(self, hub):
        hub({"question": [str(i) for i in range(3 * datasets_prompts.ROWS)]})
        one, same, other = (choose(read_prompts("gsm8k"), source="", count=8, seed=seed) for seed in (1, 1, 2))
        assert one == same != other
        assert one.available == datasets_prompts.ROWS
        assert not set(one.search) & set(one.measure)

    def test_a_folder_of_the_same_name_is_a_path(self, hub, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "gsm8k").mkdir()
        (tmp_path / "gsm8k" / "a.txt").write_text("mine")
        hub(COLUMNS["gsm8k"])
        assert read_prompts("gsm8k").texts == ("Question: 1 + 1?\nAnswer:",)
        assert read_prompts("./gsm8k").texts == ("mine",)

    @pytest.mark.parametrize(
        "error",
        [
            ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)"),
            OfflineModeIsEnabled("offline"),
            OSError("Name or service not known"),
            TimeoutError(),
            DatasetNotFoundError("Dataset 'openai/gsm8k' doesn't exist on the Hub or cannot be accessed."),
            FileNotFoundError("Couldn't find any data file at /x. Couldn't find it on the Hub either: E: none\nat all"),
            RuntimeError("Dataset scripts are no longer supported, but found gsm8k.py"),
            ValueError("BuilderConfig 'main' not found."),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_what_to_do_without_it(self, hub, monkeypatch, error):
        hub(error=error)
        for reachable in (False, True):
            monkeypatch.setattr(datasets_prompts, "unreachable", lambda: None if reachable else "cannot be reached")
            with pytest.raises(SelfspecError, match=r"^gsm8k: ") as refused:
                read_prompts("gsm8k")
            assert "\n" not in str(refused.value)
            assert "/x" not in str(refused.value)
            assert str(refused.value).endswith(
                "; download a parquet file of its split train of config main from "
                "https://huggingface.co/datasets/openai/gsm8k and give it: --prompts FILE.parquet --column question "
                r"--template 'Question: {question}\nAnswer:'"
            )

    def test_offline_nothing_is_asked_or_waited_for(self, capfd, monkeypatch):
        for name in ("socket.socket.connect", "socket.getaddrinfo", "time.sleep"):
            monkeypatch.setattr(name, lambda *_, **__: pytest.fail("asked or waited"))
        with pytest.raises(SelfspecError, match="gsm8k: HF_HUB_OFFLINE is set, and the cache has no copy; download"):
            read_prompts("gsm8k")
        assert capfd.readouterr() == ("", "")

    def test_a_dead_network_is_asked_once(self, monkeypatch):
        """Then `datasets` looks in its cache alone, and its settings are as they were."""
        asked = []

        class Session:
            def head(self, url, *, timeout):
                asked.append((url, timeout))
                raise OSError("no route")

        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_session", Session)
        with pytest.raises(
            SelfspecError, match=r"gsm8k: https://\S+ cannot be reached, and the cache has no copy; down"
        ):
            read_prompts("gsm8k")
        assert asked == [(datasets.config.HF_ENDPOINT, the_hub.PATIENCE)]
        assert datasets.config.HF_HUB_OFFLINE is False

    def test_the_help_names_them_all(self):
        assert ", ".join(datasets_prompts.PRESETS) in _KINDS
