"""Least squares whose answer is not negative, for a handful of unknowns."""

SWEEPS = 16


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The x of `matrix · x = right` by Cholesky. `matrix` is symmetric and positive definite."""
    size = len(right)
    lower: list[list[float]] = []
    x: list[float] = []
    for i in range(size):
        row: list[float] = []
        for j in range(i):
            done = lower[j]
            row.append((matrix[i][j] - sum(map(float.__mul__, row, done[:j]))) / done[j])
        row.append((matrix[i][i] - sum(value * value for value in row)) ** 0.5)
        x.append((right[i] - sum(map(float.__mul__, row[:i], x))) / row[i])
        lower.append(row)
    for i in range(size - 1, -1, -1):
        x[i] = (x[i] - sum(lower[j][i] * x[j] for j in range(i + 1, size))) / lower[i][i]
    return x


def nonnegative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The x >= 0 that minimises `x·matrix·x / 2 - right·x`. `matrix` is symmetric, positive definite, its diagonal 1.

    The most negative unknown leaves until none is negative (exact if they leave in a right order); then a few sweeps of
    coordinate descent, each of which only improves, let those back in that left too early.
    """
    size = len(right)
    kept = list(range(size))
    part: list[float] = []
    while kept:
        part = solve([[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept])
        worst = min(range(len(kept)), key=part.__getitem__)
        if part[worst] >= 0.0:
            break
        del kept[worst]
    x = [0.0] * size
    for i, value in zip(kept, part, strict=False):
        x[i] = value
    return x if len(kept) == size else _swept(matrix, right, x)


def _swept(matrix: list[list[float]], right: list[float], x: list[float]) -> list[float]:
    for _ in range(SWEEPS):
        for i, row in enumerate(matrix):
            x[i] = max(0.0, x[i] + (right[i] - sum(map(float.__mul__, row, x))) / row[i])
    return x
