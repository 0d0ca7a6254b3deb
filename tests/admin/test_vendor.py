"""Vendored files: each is locked by its hash, comes with its licence, and loads nothing from anywhere."""

import hashlib
import json
import re

import pytest

from tests.admin.sources import VENDOR

LOCK: dict[str, dict[str, str]] = json.loads((VENDOR / "vendor.lock.json").read_text())
LICENCES = (VENDOR / "LICENSES.txt").read_text()
OWN = {"vendor.lock.json", "LICENSES.txt"}
NAMESPACES = {
    "http://www.w3.org/1998/Math/MathML",
    "http://www.w3.org/1999/xhtml",
    "http://www.w3.org/1999/xlink",
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/XML/1998/namespace",
}
"""XML namespaces: they look like addresses, but nothing is loaded from them."""
MENTIONS = {
    "https://github.com/highlightjs/highlight.js",
    "https://alpinejs.dev",
}
"""Addresses that comments and messages mention for people to visit."""
LOADING = (
    r"(?<![\"'@])\bimport\s*[(\"']|(?<![\"'])\bfrom\s*[\"'][^\"'.]|(?<!\.)\bfetch\s*\((?!\))|importScripts|XMLHttpRequest|EventSource"
    r"|sendBeacon"
)


def test_every_file_is_locked_and_every_lock_has_its_file() -> None:
    assert set(LOCK) == {path.name for path in VENDOR.iterdir()} - OWN


@pytest.mark.parametrize("name", sorted(LOCK))
def test_a_file_is_the_one_that_was_locked(name: str) -> None:
    entry = LOCK[name]
    assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == entry["sha256"]
    assert set(entry) == {"package", "version", "path", "sha256", "licence"}
    assert all(entry.values())
    assert "://" not in json.dumps(entry), "the origin is the name of a package, not an address"
    assert f"{entry['package']} {entry['version']} (" in LICENCES
    assert name in LICENCES


def test_the_licences_are_whole() -> None:
    for words in (
        "Permission is hereby granted, free of charge",
        "Copyright © 2019-2021 Caleb Porzio and contributors",
        "Copyright (c) 2018-present, Yuxi (Evan) You",
        "Copyright (c) 2020 Ron Kok",
        "Copyright (c) 2006, Ivan Sagalaev.",
    ):
        assert words in LICENCES, words


@pytest.mark.parametrize("name", sorted(LOCK))
def test_a_file_loads_nothing(name: str) -> None:
    text = (VENDOR / name).read_text(encoding="utf-8")
    assert re.findall(LOADING, text) == []
    addresses = set(re.findall(r"(?:https?|wss?)://[\w.-]+\.[a-z]+[\w./-]*", text)) - NAMESPACES
    assert {address for address in addresses if not any(address.startswith(mention) for mention in MENTIONS)} == set()
    assert name.endswith(".js") or not re.search(r"@import|url\(", text)
