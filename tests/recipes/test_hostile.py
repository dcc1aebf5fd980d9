"""Malformed and hostile recipes: one clear error each, nothing imported, nothing executed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from gonio.errors import RecipeError
from gonio.recipes import Recipe

SWAP = "name: x\nswap:\n  - {{where: null, use: {}}}\n"
PENALTY = "name: x\npenalty:\n  - {{where: null, use: L2, strength: {}}}\n"
WHERE = "name: x\npenalty:\n  - {{where: {}, use: L2, strength: 1}}\n"

# (what it tries, text, what the error says)
PAYLOADS = [
    # code through tags
    ("os.system", "!!python/object/apply:os.system ['touch CANARY']", "the tag"),
    ("subprocess", "name: !!python/object/apply:subprocess.check_output [[touch, CANARY]]", "the tag"),
    ("eval", 'name: x\nsource: !!python/object/apply:eval [\'open("CANARY", "w")\']', "the tag"),
    ("tuple", "name: x\nswap: !!python/tuple []", "the tag"),
    ("own tag", "name: !shout x", "the tag '!shout'"),
    ("tag directive", "%TAG ! tag:yaml.org,2002:python/object/apply:\n---\n!os.system [touch CANARY]", "the tag"),
    # code through names
    ("dotted path", SWAP.format("os.system"), "no name for swap.*'os.system'"),
    ("gonio path", SWAP.format("gonio.nn.DecoupledConv2d.from_conv"), "no name for swap"),
    ("dunder", SWAP.format("__import__"), "no name for swap"),
    ("torch class method", SWAP.format("DecoupledConv2d.register_forward_hook"), "no name for swap"),
    ("interpolation", SWAP.format("'${oc.env:HOME}'"), "no name for swap"),
    ("hydra target", "name: x\n_target_: os.system", "no key '_target_'"),
    ("dunder option", "name: x\npenalty:\n  - {use: L2, strength: 1, __class__: x}", "no option '__class__'"),
    ("self as option", "name: x\npenalty:\n  - {use: L2, strength: 1, self: 1}", "no option 'self'"),
    ("hidden option", "name: x\ninit:\n  - {use: orthogonal_, generator: 1}", "no option 'generator'"),
    (
        "object that is none",
        "name: x\nswap:\n  - {use: DecoupledConv2d.from_conv, magnitude: os}",
        "no magnitude named 'os'",
    ),
    (
        "object of another kind",
        "name: x\nswap:\n  - {use: DecoupledConv2d.from_conv, magnitude: Cosine}",
        "no magnitude named",
    ),
    (
        "object with code",
        "name: x\nswap:\n  - {use: DecoupledConv2d.from_conv, magnitude: {eval: {x: 1}}}",
        "no magnitude",
    ),
    # time and memory
    ("billion laughs", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "the anchor &a"),
    ("self reference", "name: x\nswap: &s [*s]", "the anchor &s"),
    ("merge key", "name: x\n<<: {swap: []}", "no key '<<'"),
    ("deep lists", "[" * 50_000, "nested more than"),
    ("deep block", "\n".join(" " * i + "- " for i in range(400)), "nested more than"),
    ("large", "name: " + "x" * 300_000, "larger than 256 KiB"),
    ("long integer", PENALTY.format("9" * 10_000), "finite number"),
    ("catastrophic regex", WHERE.format("'re:(a+)+$'"), "exponential time"),
    ("catastrophic regex 3", WHERE.format("'re:((?:a|b+)c?)*x'"), "exponential time"),
    ("catastrophic alternatives", WHERE.format("'re:(a|a)*b'"), "exponential time"),
    ("catastrophic chain", WHERE.format("'re:" + 5 * "[^b]*" + "'"), "at most 4 repetitions"),
    ("huge count", WHERE.format("'re:a{4294967295}'"), "where: "),
    ("long where", WHERE.format("a*" * 300), "where: must be text"),
    # text that would act elsewhere
    ("path traversal", "name: ../../etc/passwd", "name: must begin with"),
    ("html", "name: <script>alert(1)</script>", "name: must begin with"),
    ("option-like", "name: -rf", "name: must begin with"),
    ("long name", "name: " + "x" * 65, "name: must begin with"),
    ("escape sequence", 'name: x\nsource: "\\e]0;owned\\a"', "printable"),
    ("bidi override", 'name: x\nsource: "\\u202egnp.exe"', "printable"),
    ("null byte", 'name: "x\\0"', "printable"),
    ("surrogate", 'name: x\nsource: "\\ud83d"', "printable"),
    ("reserved", "name: baseline\ninit: [{use: orthogonal_}]", "`baseline` is the name of the unchanged model"),
    # mistakes
    ("empty", "", "a recipe is a mapping"),
    ("no name", "swap: []", "needs the key 'name'"),
    ("name is a number", "name: 5", "name: must be text"),
    ("unknown key", "name: x\npenalties: []", "no key 'penalties'. Did you mean penalty"),
    ("verb is no list", "name: x\nswap: {where: a, use: b}", "swap: must be a list"),
    ("verb is null", "name: x\nswap:", "swap: must be a list of rules.*found nothing"),
    ("rule is no mapping", "name: x\nswap: [DecoupledConv2d]", "a rule is a mapping"),
    ("rule without use", "name: x\nswap: [{where: a}]", "needs `use`"),
    ("use is a list", "name: x\nswap: [{use: [a, b]}]", "needs `use`"),
    ("where is a list", WHERE.format("[a, b]"), "where: must be text"),
    ("where is a number", WHERE.format("3"), "where: must be text"),
    ("where is empty", WHERE.format("''"), "where: must be text"),
    ("where is no regex", WHERE.format("'re:('"), "where: .*regular expression"),
    ("where is no class", WHERE.format("'type:os.system'"), "where: .*takes the name of a class"),
    ("keep with options", "name: x\npenalty: [{where: a, use: keep, strength: 1}]", "`keep` takes no options"),
    ("strength is text", PENALTY.format("'1'"), "strength: found '1'; expected a valid number"),
    ("strength is true", PENALTY.format("true"), "strength: found True; expected a valid number"),
    ("strength is negative", PENALTY.format("-1"), "finite strength >= 0"),
    ("strength is infinite", PENALTY.format(".inf"), "finite number"),
    ("strength is missing", "name: x\npenalty: [{use: L2}]", "L2 needs strength"),
    ("misspelt option", "name: x\npenalty: [{use: L2, strenght: 1}]", "no option 'strenght'. Did you mean strength"),
    ("tensor is a number", "name: x\nparametrize: [{use: WeightNorm, tensor: 3}]", "tensor: must be a name"),
    ("duplicate key", "name: x\nname: y", "occurs twice"),
    ("two documents", "name: x\n---\nname: y", "second one"),
    ("unclosed list", "name: x\nswap: [", "is not valid YAML"),
    ("unclosed quote", 'name: "x', "is not valid YAML"),
    ("tab as indentation", "name: x\nswap:\n\t- {use: keep}", "is not valid YAML"),
    ("key is a number", "name: x\n1: y", "a key must be text"),
    ("key is a list", "name: x\n? [a]\n: y", "a key must be text"),
    ("source is a list", "name: x\nsource: [a]", "source: must be text"),
    ("every is a fraction", "name: x\npenalty: [{use: L2, strength: 1, every: 1.5}]", "every: found 1.5"),
    ("every is zero", "name: x\npenalty: [{use: L2, strength: 1, every: 0}]", "every"),
    ("choice that is none", "name: x\ninit: [{use: he_, distribution: cauchy}]", "distribution: found 'cauchy'"),
    ("object has two names", "name: x\nswap: [{use: DecoupledConv2d, magnitude: {Tanh: {}, Ball: {}}}]", "magnitude"),
    (
        "object's option",
        "name: x\nswap: [{use: DecoupledConv2d, magnitude: {Tanh: {radios: 1}}}]",
        "no option 'radios'",
    ),
    (
        "object's value",
        "name: x\nswap: [{use: DecoupledConv2d, magnitude: {Tanh: {learn_radius: 2}}}]",
        "learn_radius: found 2",
    ),
    ("negative radius", "name: x\nswap: [{use: DecoupledConv2d, magnitude: {Tanh: {radius: -1}}}]", "radius"),
    ("tensor is a path", "name: x\nparametrize: [{use: WeightNorm, tensor: a.b}]", "tensor: must be a name"),
]


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in PAYLOADS], ids=[row[0] for row in PAYLOADS])
def test_each_is_one_error_that_names_the_file(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.yaml").write_text(text, encoding="utf-8")
    Recipe.load("scale-shift")  # so that only what the payload imports is new afterwards
    before, start = set(sys.modules), time.process_time()
    with pytest.raises(RecipeError, match=rf"(?s)^payload\.yaml[: ].*{message}") as caught:
        Recipe.load("payload.yaml")
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 2000
    assert set(sys.modules) <= before
    assert [path.name for path in tmp_path.iterdir()] == ["payload.yaml"]
