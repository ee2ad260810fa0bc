"""What a block does besides its fully connected layers."""

from __future__ import annotations

from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave_studies.layer_operations import ops_besides_fc_layers


def test_flops_are_those_of_narayanan() -> None:
    """4 b s s H forward and twice that backward."""
    model, work = load_model("gpt3"), Workload(128, 2048)
    forward = sum(one.flops for one in ops_besides_fc_layers(model, work) if one.direction == "forward")
    assert forward == 4 * 128 * 2048 * 2048 * 12288
    assert sum(one.flops for one in ops_besides_fc_layers(model, work)) == 3 * forward


def test_bytes_of_scores_by_hand() -> None:
    """Per score: softmax 4 and 6, dropout 5 and 5, six products that read or write it once, 2 each."""
    model, work = load_model("gpt3"), Workload(1, 2048)
    scores = 96 * 2048 * 2048
    by_name = {(one.name, one.direction): one.bytes for one in ops_besides_fc_layers(model, work)}
    assert by_name["softmax", "forward"] == 4 * scores
    assert by_name["softmax", "backward"] == 6 * scores
    assert by_name["dropout of scores", "backward"] == 5 * scores
    assert by_name["dQ", "backward"] == 2 * scores + 2 * 2 * 2048 * 12288


def test_bytes_per_token_of_what_is_linear_in_it() -> None:
    """54 h forward and 66 h backward where q = g = h and f = 4 h, in bf16."""
    model, work = load_model("gpt3"), Workload(1, 2048)
    linear = {
        "layer norms",
        "split into heads",
        "merge heads",
        "bias, dropout, residual",
        "bias and activation",
    }
    for direction, expected in (("forward", 54), ("backward", 66)):
        counted = sum(
            one.bytes
            for one in ops_besides_fc_layers(model, work)
            if one.name in linear and one.direction == direction
        )
        assert counted == expected * 12288 * 2048


def test_a_gated_ffn_moves_more() -> None:
    work = Workload(1, 1024)
    gated = {
        (one.name, one.direction): one.bytes for one in ops_besides_fc_layers(load_model("llama-2-7b"), work)
    }
    assert gated["bias and activation", "forward"] == 2 * 1024 * 3 * 11008
    assert gated["bias and activation", "backward"] == 2 * 1024 * 5 * 11008
