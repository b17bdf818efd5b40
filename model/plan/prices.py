"""Prices of instances in dollars an hour, from a dated file of public prices or from a user's file.

`prices.json` has an entry for each instance type with a public price, with its terms, region, date and source. AWS
sells trn2 in Capacity Blocks, so the rate of a block stands for the on-demand price there. No price is public for
trn2u.48xlarge, the UltraServers and trn3. Plans and recommendations call `find_price`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from model.device import Instance
from model.errors import ModelError, read_text_file

PRICES = Path(__file__).with_name("prices.json")
"""The shipped prices."""

CHEAPEST, DEAREST = 1e-6, 1e9
"""Limits of a price in dollars an hour; outside of them, prices of tokens exceed float64."""

_CODE = "NKW-MODEL-OPTION"


@dataclass(frozen=True)
class Price:
    """Price of an instance in dollars an hour; the four texts on its origin are empty where they are not known."""

    dollars_per_hour: float
    terms: str = ""
    region: str = ""
    date: str = ""
    source: str = ""

    def __str__(self) -> str:
        origin = ", ".join(filter(None, (self.terms, self.region, self.date)))
        return f"${self.dollars_per_hour:,.2f}/h" + (f" ({origin})" if origin else "")


def read_prices(path: Path = PRICES) -> dict[str, Price]:
    """Return the prices of a JSON file by instance type.

    The file is a JSON object with an object for each instance type. Each has the key `dollars_per_hour`, and optionally
    `terms`, `region`, `date` and `source`.

    Raises:
        ModelError: The file cannot be read, is not JSON, or has another form.
    """
    try:
        document = json.loads(read_text_file(path, _CODE))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", _CODE) from None
    if not isinstance(document, dict):
        raise ModelError(
            f"{path} is no JSON object of prices by instance type; write one such as "
            '{"trn2.48xlarge": {"dollars_per_hour": 35.76}}',
            _CODE,
        )
    return {name: _read_price(path, name, entry) for name, entry in document.items()}


def find_price(instance: Instance, dollars: float | None, path: Path | None) -> Price | None:
    """Return the price of an instance, or None if it is not known.

    Args:
        instance: The instance. An instance of several equal members costs the sum of their prices, unless the file has
            a price of its own for it.
        dollars: The price in dollars an hour, which replaces the price in a file.
        path: A file of prices, which replaces the shipped one.

    Raises:
        ModelError: The file of prices cannot be read, or has another form.
    """
    if dollars is not None:
        return Price(dollars)
    prices = read_prices(path or PRICES)
    price, member_price = prices.get(instance.name), prices.get(instance.member or "")
    if price is None and member_price is not None:
        price = replace(member_price, dollars_per_hour=instance.members * member_price.dollars_per_hour)
    return price


def compute_price_per(count: int, per_second: float, dollars_per_hour: float) -> float:
    """Return the dollars for `count` results of an instance that gives `per_second` of them in a second."""
    return dollars_per_hour / 3600 / per_second * count


def _read_price(path: Path, name: str, entry: Any) -> Price:
    """Return the price of one entry of a file.

    Raises:
        ModelError: The entry is no object, its `dollars_per_hour` is missing or outside the limits, or it has an
            unknown key or a text that is no string.
    """
    known = {field.name for field in fields(Price)}
    dollars = entry.get("dollars_per_hour") if isinstance(entry, dict) else None
    if not isinstance(dollars, (int, float)) or isinstance(dollars, bool) or not _is_price(dollars):
        raise ModelError(
            f"{path}, {name!r:.60}: dollars_per_hour is no number from {CHEAPEST:g} to {DEAREST:g}", _CODE
        )
    texts = {key: text for key, text in entry.items() if key != "dollars_per_hour"}
    for key, text in texts.items():
        if key not in known or not isinstance(text, str):
            raise ModelError(
                f"{path}, {name!r:.60}: {key!r:.60} is no text of a price; texts are terms, region, date and source",
                _CODE,
            )
    return Price(dollars, **texts)


def _is_price(dollars: float) -> bool:
    """Return whether a number is finite and from `CHEAPEST` to `DEAREST`."""
    return math.isfinite(dollars) and CHEAPEST <= dollars <= DEAREST
