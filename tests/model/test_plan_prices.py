"""Prices of instances: the shipped file, a user's file, and the sum of equal parts."""

from __future__ import annotations

import json
import re

import pytest

from model.device import INSTANCES, find_instance
from model.errors import ModelError
from model.plan.prices import PRICES, Price, find_price, read_prices


def test_every_shipped_price_has_terms_a_region_a_date_and_a_source() -> None:
    prices = read_prices()
    assert {"trn1.32xlarge", "inf2.48xlarge", "trn2.48xlarge"} <= prices.keys() <= INSTANCES.keys()
    for price in prices.values():
        assert price.terms and re.fullmatch(r"[a-z]+(-[a-z]+)+-\d", price.region)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", price.date)
        assert "AWS Price List" in price.source or "aws.amazon.com" in price.source


def test_a_price_is_that_given_else_of_the_file_else_unknown(tmp_path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"trn3.3xlarge": {"dollars_per_hour": 5}}))
    trn1, trn3 = find_instance("trn1.32xlarge"), find_instance("trn3.3xlarge")
    assert find_price(trn1, None, None) == read_prices(PRICES)["trn1.32xlarge"]
    assert find_price(trn3, None, None) is None
    assert find_price(trn3, None, path) == Price(5)
    assert find_price(trn1, None, path) is None
    assert find_price(trn1, 7.0, path) == Price(7.0)


def test_several_instances_cost_the_sum_of_their_parts_unless_the_file_names_them(tmp_path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(
        json.dumps(
            {"trn2u.48xlarge": {"dollars_per_hour": 40.0}, "2 x trn1.32xlarge": {"dollars_per_hour": 30.0}}
        )
    )
    assert find_price(find_instance("4 x trn1.32xlarge"), None, None).dollars_per_hour == 4 * 21.5
    assert find_price(find_instance("trn2 UltraServer"), None, path) == Price(160.0)
    assert find_price(find_instance("2 x trn1.32xlarge"), None, path) == Price(30.0)
    assert find_price(find_instance("4 x trn1.32xlarge"), None, path) is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dollars_per_hour": 1e-6}, ""),
        ({"dollars_per_hour": 1e9}, ""),
        ({"dollars_per_hour": 9e-7}, "dollars_per_hour is no number from 1e-06 to 1e+09"),
        ({"dollars_per_hour": 1.1e9}, "dollars_per_hour is no number from 1e-06 to 1e+09"),
        ({"dollars_per_hour": True}, "dollars_per_hour is no number"),
        ({"dollars_per_hour": "1"}, "dollars_per_hour is no number"),
        (3, "dollars_per_hour is no number"),
        ({"dollars_per_hour": 3, "date": "2026-01-01"}, ""),
        ({"dollars_per_hour": 3, "date": 2026}, "'date' is no text of a price"),
        ({"dollars_per_hour": 3, "currency": "EUR"}, "'currency' is no text of a price"),
    ],
)
def test_an_entry_is_a_price_within_the_limits_and_texts(tmp_path, entry, message) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"trn1.2xlarge": entry}))
    if message:
        with pytest.raises(ModelError, match=re.escape(message)):
            read_prices(path)
    else:
        assert read_prices(path)["trn1.2xlarge"].dollars_per_hour == entry["dollars_per_hour"]


@pytest.mark.parametrize(("text", "message"), [("[]", "no JSON object of prices"), ("{", "is not JSON")])
def test_a_file_of_another_form_is_refused(tmp_path, text, message) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        read_prices(path)
    path.write_text("{}")
    assert read_prices(path) == {}
