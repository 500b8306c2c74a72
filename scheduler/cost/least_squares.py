"""Small linear least-squares problems, without numpy: the scheduler does not import it to learn."""

from __future__ import annotations

from collections.abc import Collection, Sequence

RIDGE = 1e-4  # weight of the prior, in observations of typical size


def solve_nonnegative(
    a: Sequence[Sequence[float]], b: Sequence[float], prior: Sequence[float], free: Collection[int] = ()
) -> list[float]:
    """The weights w of least squares with sums `a` of u u' and `b` of u y, drawn to `prior` where nothing was observed.

    Negative weights, except `free` ones, are set to 0 and the others are fitted again. More work never takes less
    time, but noise in two correlated features could make it seem so.
    """
    used = list(range(len(b)))
    solved = [0.0] * len(b)
    while used:
        some = solve(
            [[a[i][j] + (RIDGE if i == j else 0.0) for j in used] for i in used],
            [b[i] + RIDGE * prior[i] for i in used],
        )
        bound = [number for number, i in enumerate(used) if i not in free and some[number] < 0.0]
        if not bound:
            for number, i in enumerate(used):
                solved[i] = some[number]
            return solved
        del used[min(bound, key=lambda number: some[number])]
    return solved


def solve(a: list[list[float]], b: list[float]) -> list[float]:
    """The x of `a x = b` for a small, symmetric, positive definite `a`. Gaussian elimination; overwrites both."""
    size = len(b)
    for i in range(size):
        for j in range(i + 1, size):
            factor = a[j][i] / a[i][i]
            b[j] -= factor * b[i]
            for k in range(i, size):
                a[j][k] -= factor * a[i][k]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (b[i] - sum(a[i][k] * x[k] for k in range(i + 1, size))) / a[i][i]
    return x
