from __future__ import annotations

import pytest

from megatron_dapo.reward.plugin import load_plugin
from tests.unit.reward import plugins


def test_a_function_is_found_by_its_dotted_path() -> None:
    assert load_plugin("tests.unit.reward.plugins:echo") is plugins.echo


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "dotted.path:function"),
        ("a.b:", "dotted.path:function"),
        ("a..b:f", "dotted.path:function"),
        ("a/b.py:f", "dotted.path:function"),
        ("no_such_module_here:f", "PYTHONPATH"),
        ("tests.unit.reward.plugins:missing", "has no missing"),
        ("tests.unit.reward.plugins:number", "plain function"),
        ("tests.unit.reward.plugins:later", "plain function"),
        ("tests.unit.reward.plugins:too_few", "must take"),
    ],
)
def test_a_bad_plugin_is_refused_before_the_run(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_plugin(path)
