"""Which form of the gate a device takes."""

import pytest
import torch

from pdmesh.kernels import cuda_gate, gate_choice
from pdmesh.kernels.gate import GateRule
from pdmesh.kernels.triton import gate as triton_gate

V3 = GateRule("noaux_tc", 256, 8, 8, 4, True, 2.5)
V2 = GateRule("group_limited_greedy", 160, 6, 8, 3, False, 16.0)


@pytest.fixture
def taken(monkeypatch):
    """Calls a gate and says which form was asked, and how."""
    calls = []
    for name, module in (("clusters", cuda_gate), ("triton", triton_gate)):
        monkeypatch.setattr(
            module, "gate_topk", lambda *args, name=name, **more: calls.append((name, args, more))
        )
    monkeypatch.setattr(cuda_gate, "unavailable", lambda: None)

    def take(m, rule=V3, dtype=torch.bfloat16, biased=True):
        x = torch.zeros(m, 64, dtype=torch.bfloat16)
        weight = torch.zeros(rule.num_experts, 64, dtype=dtype)
        bias = torch.zeros(rule.num_experts) if biased else None
        gate_choice.gate_topk(x, weight, bias, rule, torch.tensor(m))
        (name, args, more) = calls.pop()
        assert args[:4] == (x, weight, bias, rule)
        assert args[4] == m
        assert more == ({"dependent": True} if name == "clusters" else {})
        return name

    return take


@pytest.mark.parametrize("m", [0, 1, 128, 256])
def test_clusters_take_deepseek_v3s_rule_up_to_256_rows(taken, m):
    assert taken(m) == "clusters"


def test_triton_takes_more_rows_another_rule_a_wider_weight_and_what_has_no_bias(taken):
    assert taken(257) == "triton"
    assert taken(2, rule=V2) == "triton"
    assert taken(2, dtype=torch.float32) == "triton"
    assert taken(2, biased=False) == "triton"


def test_triton_takes_all_where_there_is_no_compiler(taken, monkeypatch):
    monkeypatch.setattr(cuda_gate, "unavailable", lambda: "nvcc was not found")
    assert taken(2) == "triton"
