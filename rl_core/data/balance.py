"""Partitions rows into groups with about equal token sums: micro-batches of a rank, and the shares of ranks."""

import heapq

# The sum of the lengths of a group's rows, and the rows.
Group = tuple[int, list[int]]


def balanced_parts(lengths: list[int], parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Partition row indices into `parts` groups with about equal sums of lengths, by the largest differencing method
    (Karmarkar and Karp, 1982).

    Groups are sorted by descending sum; none is empty if there are enough rows. With `equal_counts`, all groups have
    the same number of rows, and `parts` must divide `len(lengths)`. Deterministic.
    """
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    width = parts if equal_counts else 1
    # Partitions of a few rows each; the one whose groups differ most is on top, the number only breaks ties.
    heap: list[tuple[int, int, list[Group]]] = [(0, -1, [(0, [])] * parts)]
    for start in range(0, len(by_length), width):
        groups: list[Group] = [(lengths[row], [row]) for row in by_length[start : start + width]]
        heap.append(_entry(start, groups + [(0, [])] * (parts - len(groups))))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # Pair the heaviest group with the lightest: the result differs by the difference of the two differences.
        pairs = zip(first, reversed(second), strict=True)
        heapq.heappush(heap, _entry(number, [(a + b, rows + more) for (a, rows), (b, more) in pairs]))
    return [sorted(rows) for _, rows in heap[0][2]]


def _entry(number: int, groups: list[Group]) -> tuple[int, int, list[Group]]:
    # Groups with rows sort before empty ones of the same sum, so that the empty ones are filled first.
    groups = sorted(groups, key=lambda group: (-group[0], -len(group[1])))
    return groups[-1][0] - groups[0][0], number, groups
