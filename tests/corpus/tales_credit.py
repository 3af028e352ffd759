"""Stories about credit: rewards of calls and of spans of their tokens, and failures that count or do not."""

from __future__ import annotations

from collections.abc import Iterator

from tests.corpus.telling import Story, call, message, output, refuses, said, selects, user

TWO = (call("c1", said("one"), samples=3), call("c2", said("two"), parent="c1"))
RETURNED = (message("one"), user(), message("two"))
BOTH = {"c1": "content", "c2": "content"}


def stories() -> Iterator[Story]:
    """Tell the stories of this file."""
    yield Story(
        "credit_at_its_tokens",
        """A judge gave the first tokens of the first call half a point and the whole second call an advantage. In the
        row both stand at the tokens that they name, and the call that nobody returned keeps its own out of it.""",
        [*TWO, call("x", said("aside"), parent="c1")],
        output(
            *RETURNED,
            credits=[
                {"model_call_id": "c2", "advantage": -1.0},
                {"model_call_id": "c1", "end": 2, "reward": 0.5},
                {"model_call_id": "x", "reward": 9.0},
            ],
        ),
        selects(
            "c1",
            "c2",
            why={**BOTH, "x": "not_returned"},
            credits=[[["c1", 2, 4, 0.5, None], ["c2", 6, 8, None, -1.0]]],
        ),
    )
    yield Story(
        "credit_counts_once_over_rows",
        """The second turn's prompt drifted, so that the two calls make two rows. Each credit stands in the row that
        trains its call: added up over rows, a reward is still that reward.""",
        [TWO[0], call("c2", said("two"), parent="c1", drifts=True)],
        output(
            *RETURNED,
            credits=[{"model_call_id": "c1", "reward": 1.0}, {"model_call_id": "c2", "start": 1, "reward": 2.0}],
        ),
        selects(
            "c1",
            "c2",
            why=BOTH,
            rows=[["c1"], ["c2"]],
            credits=[[["c1", 2, 5, 1.0, None]], [["c2", 3, 4, 2.0, None]]],
        ),
    )
    yield Story(
        "credit_of_an_unknown_call",
        """The judge scored a call that was never captured: another rollout's, or a misspelt id. To train on the other
        credits only would hide it.""",
        TWO,
        output(*RETURNED, credits=[{"model_call_id": "c1", "reward": 1.0}, {"model_call_id": "c3", "reward": 1.0}]),
        refuses("call_unknown", "c3", where="$.credits[1].model_call_id"),
    )
    yield Story(
        "credit_outside_the_generation",
        """A span that ends behind the last token that the call sampled: its author counted other tokens. Cutting it
        would put the reward where he did not mean it.""",
        TWO,
        output(*RETURNED, credits=[{"model_call_id": "c1", "start": 1, "end": 4, "reward": 1.0}]),
        refuses("credit_invalid", "[1, 4)", "3 tokens", where="$.credits[0]"),
    )
    yield Story(
        "failure_that_is_masked",
        """The sandbox was gone before the tests ran, and the harness gave 0. That says nothing about the policy, so the
        rollout is refused, however well its history can be explained.""",
        TWO,
        output(*RETURNED, reward=0.0, failure={"reason": "the sandbox was gone", "attribution": "mask"}),
        refuses("failure_masked", "the sandbox was gone"),
    )
    yield Story(
        "failure_that_is_scored",
        """The agent ran out of steps. That is the policy's doing: the rollout is trained with the reward that it was
        given.""",
        TWO,
        output(*RETURNED, reward=0.0, failure={"reason": "out of steps", "attribution": "score"}),
        selects("c1", "c2", why=BOTH),
    )
