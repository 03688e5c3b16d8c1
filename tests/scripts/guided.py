"""Guided generation with and without drafts: tokens a second over ten shapes of JSON schema.

    python tests/scripts/guided.py --model smollm2-135m --out /tmp/guided.jsonl
    python tests/scripts/guided.py --model smollm2-135m --out /tmp/guided.jsonl --schemas book,person

Every schema's question is answered greedily, plainly and as `generate` does it, in turns. Each answer is a line of the
file, to which further runs add; a table of medians over the whole file is printed at the end. Texts that differ, as
rounding in float32 lets them, are named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import selfspec
from selfspec.drafters import PlainDrafter


def record(**properties: Any) -> dict[str, Any]:
    """An object with all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(most: int = 40) -> dict[str, Any]:
    """A string of at most so many characters."""
    return {"type": "string", "maxLength": most}


def whole(least: int, most: int) -> dict[str, Any]:
    """A whole number."""
    return {"type": "integer", "minimum": least, "maximum": most}


def several(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    """A list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def one_of(*values: str) -> dict[str, Any]:
    """One of these words."""
    return {"enum": list(values)}


YES = {"type": "boolean"}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "book": (
        "Describe the book Moby Dick as JSON.",
        record(
            title=text(),
            author=text(),
            year=whole(1000, 2030),
            genre=one_of("novel", "poetry", "essay", "history"),
            in_print=YES,
        ),
    ),
    "person": (
        "Make up a customer record as JSON.",
        record(
            first_name=text(20),
            last_name=text(20),
            email=text(),
            age=whole(18, 99),
            address=record(street=text(), city=text(20), postal_code=text(10), country=text(20)),
        ),
    ),
    "invoice": (
        "Write an invoice for office chairs and desks as JSON.",
        record(
            invoice_number=text(12),
            currency=one_of("USD", "EUR", "GBP"),
            line_items=several(record(description=text(30), quantity=whole(1, 99), unit_price=whole(1, 9999)), 2, 3),
            total=whole(1, 99999),
            paid=YES,
        ),
    ),
    "event": (
        "Write a calendar entry for a conference in Lisbon as JSON.",
        record(
            name=text(),
            start_date=text(10),
            end_date=text(10),
            location=record(venue=text(30), city=text(20)),
            attendees=several(text(20), 2, 3),
            cancelled=YES,
        ),
    ),
    "weather": (
        "Give the weather in Oslo in January as JSON.",
        record(
            city=text(20),
            temperature_celsius=whole(-40, 50),
            condition=one_of("sunny", "cloudy", "rainy", "snowy", "windy"),
            humidity_percent=whole(0, 100),
            wind_speed_kmh=whole(0, 200),
        ),
    ),
    "recipe": (
        "Give a recipe for pancakes as JSON.",
        record(
            recipe_name=text(),
            servings=whole(1, 12),
            preparation_minutes=whole(1, 240),
            ingredients=several(record(ingredient=text(20), amount=text(12)), 2, 4),
            difficulty=one_of("easy", "medium", "hard"),
        ),
    ),
    "function": (
        "Call the right function to fly two people from Paris to Rome on 2025-03-04. Answer as JSON.",
        record(
            function=one_of("search_flights", "book_hotel", "cancel_booking"),
            arguments=record(
                origin=text(20),
                destination=text(20),
                departure_date=text(10),
                passengers=whole(1, 9),
                cabin_class=one_of("economy", "premium_economy", "business", "first"),
            ),
        ),
    ),
    "review": (
        "Summarise as JSON: the headphones sound great but the battery is weak.",
        record(
            product=text(30),
            rating=whole(1, 5),
            sentiment=one_of("positive", "neutral", "negative"),
            pros=several(text(30), 1, 2),
            cons=several(text(30), 1, 2),
            would_recommend=YES,
        ),
    ),
    "ticket": (
        "Write a bug report as JSON: the login page crashes on phones.",
        record(
            ticket_id=text(10),
            priority=one_of("low", "medium", "high", "critical"),
            status=one_of("open", "in_progress", "resolved", "closed"),
            assigned_to=text(20),
            summary=text(60),
            labels=several(one_of("bug", "feature", "documentation", "question"), 1, 3),
        ),
    ),
    "deployment": (
        "Write the deployment of a web shop as JSON.",
        record(
            service_name=text(20),
            replicas=whole(1, 20),
            container=record(
                image=text(30), port=whole(1, 65535), environment=one_of("development", "staging", "production")
            ),
            health_check=record(path=text(20), interval_seconds=whole(1, 60), timeout_seconds=whole(1, 60)),
            logging_enabled=YES,
        ),
    ),
}


def measure(options: argparse.Namespace) -> None:
    """Answer the questions, and add a line for each answer to the file."""
    llm = selfspec.load(options.model)
    drafters = {"plain": PlainDrafter(), "drafted": llm.drafter}
    for name in options.schemas.split(","):
        question, schema = TASKS[name]
        prompt, guide = [{"role": "user", "content": question}], llm.guide(json_schema=schema)
        llm.generate(prompt, max_new_tokens=2, guide=guide)  # compiles the grammar and warms up
        for _ in range(options.repeats):
            for how, drafter in drafters.items():
                begun = time.perf_counter()
                out = llm.generate(prompt, max_new_tokens=options.tokens, guide=guide, drafter=drafter)
                answer = {"seconds": time.perf_counter() - begun, "rounds": out.stats.rounds, "tokens": out.tokens}
                with options.out.open("a") as file:
                    file.write(json.dumps({"schema": name, "how": how, **answer}) + "\n")


def summary(file: Path) -> list[dict[str, Any]]:
    """For each schema that was answered both ways: tokens a second, tokens, rounds, and whether the texts are equal."""
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    found = []
    for name in TASKS:
        mine = {how: [a for a in answers if a["schema"] == name and a["how"] == how] for how in ("plain", "drafted")}
        if not all(mine.values()):
            continue
        rates = {how: statistics.median(len(a["tokens"]) / a["seconds"] for a in some) for how, some in mine.items()}
        found.append(
            {
                "schema": name,
                **rates,
                "ratio": rates["drafted"] / rates["plain"],
                "tokens": len(mine["plain"][0]["tokens"]),
                "rounds": statistics.median(a["rounds"] for a in mine["drafted"]),
                "same": mine["plain"][0]["tokens"] == mine["drafted"][0]["tokens"],
            }
        )
    return found


def main() -> None:
    """Measure, and print what the file holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--schemas", default=",".join(TASKS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    measure(options)
    found = summary(options.out)
    for one in found:
        speeds = f"{one['plain']:6.1f} tokens/s plain, {one['drafted']:6.1f} drafted: {one['ratio']:.2f}x"
        rounds = f"{one['tokens']} tokens in {one['rounds']:.0f} rounds"
        print(f"{one['schema']:11} {speeds}; {rounds}{'' if one['same'] else '; texts differ'}")
    print(f"median {statistics.median(one['ratio'] for one in found):.2f}x over {len(found)} schemas")


if __name__ == "__main__":
    main()
