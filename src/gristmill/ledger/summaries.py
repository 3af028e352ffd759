"""Lines of `ls`: what the attempts' rows say, without a look at calls or tokens.

Invariant: attempts come in the order in which they began, a page at a time; a page is one short read, so that a reader
who takes hours never holds back the writer, and no page depends on how many came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gristmill.ledger.protocol import AttemptKey, AttemptState, Counts, Summary
from gristmill.ledger.schema import ATTEMPTS
from gristmill.ledger.session import Session

__all__ = ["PAGE", "counts", "summary_page"]

PAGE: Final = 1000

# fmt: off
_COLUMNS: Final = (
    "attempt_no", "rollout_id", "attempt", "state", "calls", "lost", "usable_calls", "sampled_tokens",
    "prompt_tokens", "models", "first_at", "last_at", "touched_at",
)
# fmt: on
_GROUP: Final = "CASE WHEN results.attempt_no IS NULL THEN setups.group_id ELSE results.group_id END"
_SELECT: Final = (
    f"SELECT {', '.join(f'{ATTEMPTS.name}.{column}' for column in _COLUMNS)}, "
    f"reward, {_GROUP}, results.attempt_no IS NOT NULL FROM attempts LEFT JOIN results USING (attempt_no) "
    "LEFT JOIN setups USING (attempt_no) WHERE attempts.attempt_no > ?{conditions} ORDER BY attempts.attempt_no LIMIT ?"
)
_decode_models = msgspec.json.Decoder(tuple[str, ...]).decode


def summary_page(
    connection: Session, after: int, state: AttemptState | None, group_id: str | None, size: int = PAGE
) -> list[tuple[int, Summary]]:
    """Read the summaries behind attempt number `after`, each with its own number; an empty page is the end."""
    conditions, parameters = "", list[str]()
    if state is not None:
        conditions = " AND state = ?"
        parameters.append(state)
    if group_id is not None:
        conditions += f" AND {_GROUP} = ?"
        parameters.append(group_id)
    rows = connection.execute(_SELECT.format(conditions=conditions), (after, *parameters, size))
    return [(row[0], _summary(row)) for row in rows]


def _summary(row: Sequence[Any]) -> Summary:
    (_, rollout_id, attempt, state, calls, lost, usable, sampled, prompt, models, first, last, touched, *result) = row
    reward, group_id, has_result = result
    return Summary(
        key=AttemptKey(rollout_id, attempt),
        state=AttemptState(state),
        calls=calls,
        lost=lost,
        usable_calls=usable,
        sampled_tokens=sampled,
        prompt_tokens=prompt,
        models=_decode_models(models),
        reward=reward,
        group_id=group_id,
        has_result=bool(has_result),
        first_at=first,
        last_at=last,
        touched_at=touched,
    )


def counts(connection: Session) -> Counts:
    """Add up all attempts."""
    names = ("calls", "lost", "usable_calls", "sampled_tokens", "prompt_tokens")
    # Sums of integers are not integers in every database.
    sums = ", ".join(f"CAST(sum({name}) AS BIGINT)" for name in names)
    by_state: dict[AttemptState, int] = {}
    totals = dict.fromkeys(names, 0)
    for state, attempts, *values in connection.execute(f"SELECT state, count(*), {sums} FROM attempts GROUP BY state"):
        by_state[AttemptState(state)] = attempts
        for name, value in zip(names, values, strict=True):
            totals[name] += value
    return Counts(attempts=by_state, **totals)
