"""Which prefill instances prefetch for which decode instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LinkRank = Callable[[str, str], int]
"""Rank of the link between a decode and a prefill instance: 0 for the best kind."""


def pair_up(prefill: int, decode: int, rank: LinkRank = lambda decode_id, prefill_id: 0) -> list[tuple[str, str]]:
    """Pairs `(decode_id, prefill_id)`: the decode instance's candidates are prefetched into that prefill instance.

    Every instance is used. With more prefill than decode instances a decode instance has several; their numbers differ
    by at most one. The same holds the other way round. As few pairs as possible have the worst rank, then as few as
    possible the next, and so on; ties go by index.
    """
    many, few = max(prefill, decode), min(prefill, decode)

    def pair(of_many: int, of_few: int) -> tuple[str, str]:
        decode_number, prefill_number = (of_few, of_many) if prefill >= decode else (of_many, of_few)
        return f"decode-{decode_number}", f"prefill-{prefill_number}"

    ranks = [[rank(*pair(i, j)) for j in range(few)] for i in range(many)]
    if len({value for row in ranks for value in row}) == 1:
        return [pair(i, i % few) for i in range(many)]
    # A pair costs more than all pairs of lower ranks together, and one more if it is not the pair by index.
    costs = [[(2 * many) ** (1 + value) + (j != i % few) for j, value in enumerate(row)] for i, row in enumerate(ranks)]
    return [pair(i, j) for i, j in enumerate(_share_out(costs, few))]


def _share_out(costs: Sequence[Sequence[int]], few: int) -> list[int]:
    """The column of each row at the least total cost. Columns have equal numbers of rows, or one more."""
    least, over = divmod(len(costs), few)
    spare = few - over if over else 0  # each column has one more place; as many dummy rows keep the excess places empty
    places = [j % few for j in range(least * few + (few if over else 0))]
    never = 1 + sum(map(max, costs))
    square = [[row[j] for j in places] for row in costs]
    square += [[never if place < least * few else 0 for place in range(len(places))]] * spare
    return [places[place] for place in _assign(square)[: len(costs)]]


def _assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """The column of each row of a square matrix at the least total cost: the Hungarian method, O(n^3)."""
    size = len(costs)
    unseen = 4 * size * (1 + max(map(max, costs)))
    row_price, column_price = [0] * (size + 1), [0] * (size + 1)
    row_of = [0] * (size + 1)  # counted from 1; 0: the column is free. Each search begins at column 0
    for start in range(1, size + 1):
        row_of[0], column = start, 0
        least, came_from = [unseen] * (size + 1), [0] * (size + 1)
        reached, open_columns = [0], list(range(1, size + 1))
        while True:
            row = row_of[column]
            for other in open_columns:
                reduced = costs[row - 1][other - 1] - row_price[row] - column_price[other]
                if reduced < least[other]:
                    least[other], came_from[other] = reduced, column
            column = min(open_columns, key=least.__getitem__)
            step = least[column]
            for other in reached:
                row_price[row_of[other]] += step
                column_price[other] -= step
            for other in open_columns:
                least[other] -= step
            if not row_of[column]:
                break
            reached.append(column)
            open_columns.remove(column)
        while column:
            row_of[column], column = row_of[came_from[column]], came_from[column]
    columns = sorted(range(1, size + 1), key=row_of.__getitem__)
    return [column - 1 for column in columns]
