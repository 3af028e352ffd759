"""Tinker's own Datum, and the bytes that its client sends of it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden, following, rollouts  # isort: skip

import numpy as np
import tinker
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from gristmill.export.trainers.tinker import datums

TYPES = {"target_tokens": np.int64, "logprobs": np.float32, "advantages": np.float32, "mask": np.float32}


def main() -> None:
    golden = Golden("tinker", "tinker")
    for rows in rollouts():
        made = datums(rows)
        golden.is_type(len(made), len(rows), "data")
        for row, datum in zip(rows, made, strict=True):
            golden.is_type(type(datum), tinker.Datum, "class")
            inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
            golden.is_type({name: array.dtype for name, array in inputs.items()}, TYPES, "types")
            golden.is_type({array.shape for array in inputs.values()}, {(datum.model_input.length,)}, "shapes")
            tokens = [*datum.model_input.to_ints(), int(inputs["target_tokens"][-1])]
            golden.same(tokens, row.token_ids, "ids")
            golden.same(inputs["target_tokens"], tokens[1:], "targets")
            golden.same(inputs["mask"], row.loss_mask[1:], "mask")
            golden.same(inputs["logprobs"], row.logprobs[1:], "log-probabilities")
            golden.same(inputs["advantages"], row.loss_mask[1:] * np.float32(0.5), "advantages")
        equal = datums(rows, mask=False, rollouts_equal=True)
        total = sum(float(datum.loss_fn_inputs["advantages"].to_numpy().sum()) for datum in equal)
        np.testing.assert_allclose(total, 0.5, rtol=1e-5)
        golden.is_type({"mask" in datum.loss_fn_inputs for datum in equal}, {False}, "no mask")
        for loss in ("importance_sampling", "ppo", "cispo"):
            sent(golden, equal, loss)
    tinker.ServiceClient = Service
    with following("tinker.md") as (page, read):
        [(data, loss)] = page["client"].calls
        golden.is_type(len(data), len(read), "page")
        sent(golden, data, loss)
    golden.report(tinker.Datum, tinker.ModelInput, tinker.TensorData, ForwardBackwardRequest)


class Service:
    """Stands in for the service, which is not on this machine: keeps what it is sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[tinker.Datum], str]] = []

    def create_lora_training_client(self, **_: object) -> Service:
        return self

    def forward_backward(self, data: list[tinker.Datum], loss: str) -> Service:
        self.calls.append((data, loss))
        return self

    def result(self) -> None:
        return None


def sent(golden: Golden, data: list[tinker.Datum], loss: str) -> None:
    """Encode a request as the client does, decode it, and compare."""
    asked = ForwardBackwardRequest(ForwardBackwardInput(data=data, loss_fn=loss), model_id="m", seq_id=1)
    message = tinker_public_pb2.ForwardBackwardRequest.FromString(
        forward_backward_request_to_proto(asked).SerializeToString()
    )
    golden.is_type(message.loss_fn, loss, "loss")
    for got, datum in zip(message.data, data, strict=True):
        [chunk] = got.model_input
        golden.same(np.frombuffer(chunk.encoded_text.tokens, np.int32), datum.model_input.to_ints(), "tokens")
        for name, tensor in datum.loss_fn_inputs.items():
            held = np.frombuffer(got.loss_fn_inputs[name].dense, TYPES[name])
            golden.same(held, tensor.to_numpy(), name)


if __name__ == "__main__":
    main()
