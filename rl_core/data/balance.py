"""Rows in groups of about equal sums of tokens: micro-batches of a rank, and the shares of the ranks."""

import heapq

# The rows of a group, behind the sum of their lengths.
Group = tuple[int, list[int]]


def balanced_parts(lengths: list[int], parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Row indices in `parts` groups of about equal sums of lengths, by the largest differencing method
    (Karmarkar and Karp, 1982).

    Groups come heaviest first, and none is empty while there are rows for it. With `equal_counts` all have the same
    number of rows, which `parts` must divide. The same lengths always give the same groups.
    """
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    width = parts if equal_counts else 1
    # Partitions of a few rows each; on top the one whose groups differ most, the number only decides between equals.
    heap: list[tuple[int, int, list[Group]]] = [(0, -1, [(0, [])] * parts)]
    for start in range(0, len(by_length), width):
        groups: list[Group] = [(lengths[row], [row]) for row in by_length[start : start + width]]
        heap.append(_entry(start, groups + [(0, [])] * (parts - len(groups))))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # The heaviest group with the lightest one: what is left is the difference of the two partitions' differences.
        pairs = zip(first, reversed(second), strict=True)
        heapq.heappush(heap, _entry(number, [(a + b, rows + more) for (a, rows), (b, more) in pairs]))
    return [sorted(rows) for _, rows in heap[0][2]]


def _entry(number: int, groups: list[Group]) -> tuple[int, int, list[Group]]:
    # Groups with rows stand before empty ones of the same sum, so that those are filled first.
    groups = sorted(groups, key=lambda group: (-group[0], -len(group[1])))
    return groups[-1][0] - groups[0][0], number, groups
