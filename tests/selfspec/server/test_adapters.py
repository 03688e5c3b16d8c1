"""Adapters that requests name as their model."""

from __future__ import annotations

import openai
from models import adapted
from servers import served
from wants import needs

import selfspec
from selfspec.llm.batch import Batch

PROMPT, NEW = "def add(a, b):\n", 16


@needs("peft", "PEFT")
def test_a_requests_model_is_its_adapter(tmp_path):
    folders = {name: tmp_path / name for name in ("one", "two")}
    for seed, folder in enumerate(folders.values(), 1):
        adapted(seed).save_pretrained(str(folder))
    llm = selfspec.load("builtin", profile="none", adapters=folders)
    names = ("toy", "one", "two", "one")
    alone = [llm.generate(PROMPT, max_new_tokens=NEW, adapter=name if name in folders else None).text for name in names]
    assert len(set(alone)) == 3
    with served(llm, Batch(llm, rows=4), names=("toy", "one", "two")) as one:
        client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)
        with client:
            assert [model.id for model in client.models.list()] == ["toy", "one", "two"]
            for name, text in zip(names, alone, strict=True):
                answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=NEW, temperature=0)
                assert (answer.model, answer.choices[0].text) == (name, text)
