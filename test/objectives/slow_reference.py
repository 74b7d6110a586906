"""The same arithmetic as ``objectives.functional``, slow and obvious: python floats, no tensors.

A batch is a list of rows, a row a list of trained tokens; nothing here knows of padding or masks.
Where a factor is not to be differentiated it is computed from ``frozen``, so that a finite
difference in ``lp`` alone gives the gradient.
"""

import math
from itertools import combinations


def ratios(lp, old):
    return [
        [math.exp(a - b) for a, b in zip(*rows, strict=True)] for rows in zip(lp, old, strict=True)
    ]


def mean(values):
    return sum(values) / len(values) if values else 0.0


# Policy terms: f(lp, frozen, old, adv) -> rows of token losses.


def clipped_term(r, a, low, high, cap=math.inf):
    return -min(min(r, cap) * a, min(max(r, 1 - low), 1 + high) * a)


def clipped(lp, frozen, old, adv, *, low=0.2, high=0.2, cap=math.inf):
    return [
        [clipped_term(r, a, low, high, cap) for r, a in zip(rs, as_, strict=True)]
        for rs, as_ in zip(ratios(lp, old), adv, strict=True)
    ]


def gspo(lp, frozen, old, adv, *, low=0.2, high=0.2):
    out = []
    for row, old_row, as_ in zip(lp, old, adv, strict=True):
        r = math.exp(mean([a - b for a, b in zip(row, old_row, strict=True)]))
        out.append([clipped_term(r, a, low, high) for a in as_])
    return out


def gspo_token(lp, frozen, old, adv, *, low=0.2, high=0.2):
    out = []
    for row, ice, old_row, as_ in zip(lp, frozen, old, adv, strict=True):
        s = math.exp(mean([a - b for a, b in zip(ice, old_row, strict=True)]))
        out.append(
            [
                clipped_term(s * math.exp(x - x0), a, low, high)
                for x, x0, a in zip(row, ice, as_, strict=True)
            ]
        )
    return out


def cispo(lp, frozen, old, adv, *, bound=5.0):
    return [
        [-min(r, bound) * a * x for r, a, x in zip(rs, as_, row, strict=True)]
        for rs, as_, row in zip(ratios(frozen, old), adv, lp, strict=True)
    ]


def sapo_term(r, a, positive, negative):
    tau = positive if a > 0 else negative
    return -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * a


def sapo(lp, frozen, old, adv, *, positive=1.0, negative=1.05):
    return [
        [sapo_term(r, a, positive, negative) for r, a in zip(rs, as_, strict=True)]
        for rs, as_ in zip(ratios(lp, old), adv, strict=True)
    ]


def vespo(lp, frozen, old, adv):
    out = []
    for row, ice, old_row, as_ in zip(lp, frozen, old, adv, strict=True):
        w = math.exp(sum(a - b for a, b in zip(ice, old_row, strict=True)))
        w = min(max(w, 1e-8), math.exp(20.0))
        tokens = []
        for x, a in zip(row, as_, strict=True):
            k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            tokens.append(-math.exp(lam + k * math.log(w) - lam * w) * a * x)
        out.append(tokens)
    return out


def gmpo(lp, frozen, old, adv, *, low=0.4, high=0.4):
    out = []
    for row, old_row, as_ in zip(lp, old, adv, strict=True):
        logs = []
        for x, y, a in zip(row, old_row, as_, strict=True):
            log_ratio = x - y
            if a > 0:
                log_ratio = min(log_ratio, high)
            if a < 0:
                log_ratio = max(log_ratio, -low)
            logs.append(log_ratio)
        out.append([-math.exp(mean(logs)) * a for a in as_])
    return out


def binary_kl(p, q):
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def binary_divergence(pi, mu, kind):
    if kind == "tv":
        return abs(pi - mu)
    kl = binary_kl(mu, pi)
    return kl if kind == "kl" else max(kl, binary_kl(pi, mu))


def divergence_masked(lp, frozen, old, adv, *, kind, threshold, one_sided):
    out = []
    for row, ice, old_row, as_ in zip(lp, frozen, old, adv, strict=True):
        tokens = []
        for x, x0, y, a in zip(row, ice, old_row, as_, strict=True):
            pi, mu = math.exp(x0), math.exp(y)
            far = binary_divergence(pi, mu, kind) > threshold
            away = (a > 0 and pi > mu) or (a < 0 and pi < mu)
            masked = far and (away or not one_sided)
            tokens.append(0.0 if masked else -math.exp(x - y) * a)
        out.append(tokens)
    return out


# KL estimators: f(lp, frozen, ref, old) -> rows.


def kl_term(x, ref, estimator):
    d = ref - x
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]


def kl(lp, ref, estimator):
    return [
        [kl_term(x, y, estimator) for x, y in zip(*rows, strict=True)]
        for rows in zip(lp, ref, strict=True)
    ]


# Distributions over a vocabulary: f(logits, ...) -> number.


def log_softmax(logits, temperature=1.0):
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    total = top + math.log(sum(math.exp(x - top) for x in scaled))
    return [x - total for x in scaled]


def entropy(logits, temperature=1.0):
    return -sum(math.exp(x) * x for x in log_softmax(logits, temperature))


def kl_of_logits(logits, other):
    pairs = zip(log_softmax(logits), log_softmax(other), strict=True)
    return sum(math.exp(x) * (x - y) for x, y in pairs)


def jsd_of_logits(logits, teacher, weight):
    p, q = log_softmax(teacher), log_softmax(logits)
    if weight in (0, 1):
        return kl_of_logits(q, p) if weight else kl_of_logits(p, q)
    mixed = [
        math.log(weight * math.exp(a) + (1 - weight) * math.exp(b))
        for a, b in zip(p, q, strict=True)
    ]
    return weight * kl_of_logits(p, mixed) + (1 - weight) * kl_of_logits(q, mixed)


# Aggregations: f(rows of token values, ...) -> number.


def token_mean(rows, count=None):
    flat = [value for row in rows for value in row]
    return sum(flat) / (max(len(flat), 1) if count is None else count)


def sequence_mean(rows, count=None):
    return sum(map(mean, rows)) / (len(rows) if count is None else count)


def fixed_length(rows, max_tokens, count=None):
    return sum(map(sum, rows)) / ((len(rows) if count is None else count) * max_tokens)


def sequence_sum(rows, count=None):
    return sum(map(sum, rows)) / (len(rows) if count is None else count)


# Advantages: rewards are floats or None.


def std(values):
    if len(values) < 2:
        return 0.0
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1))


def members(rewards, groups, group):
    return [r for r, g in zip(rewards, groups, strict=True) if g == group and r is not None]


def group_advantage(rewards, groups, scale="group"):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        values = members(rewards, groups, group)
        if reward is None or len(set(values)) < 2:
            out.append(0.0)
            continue
        everyone = [r for r in rewards if r is not None]
        divisor = {"group": std(values) + 1e-4, "batch": std(everyone) + 1e-4, "none": 1.0}[scale]
        out.append((reward - mean(values)) / divisor)
    return out


def rloo(rewards, groups):
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [
            r
            for j, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if j != i and g == group and r is not None
        ]
        out.append(0.0 if reward is None or not others else reward - mean(others))
    return out


def maxrl(rewards, groups):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        values = members(rewards, groups, group)
        solved = reward is not None and sum(values) > 0 and len(set(values)) > 1
        out.append((reward - mean(values)) / mean(values) if solved else 0.0)
    return out


def relative_length(lengths, groups):
    longest = {
        g: max(n for n, h in zip(lengths, groups, strict=True) if h == g) for g in set(groups)
    }
    return [n / max(longest[g], 1) for n, g in zip(lengths, groups, strict=True)]


def gdpo(columns, groups, weights):
    each = [group_advantage(column, groups) for column in columns]
    total = [
        sum(w * a for w, a in zip(weights, row, strict=True)) for row in zip(*each, strict=True)
    ]
    applies = [any(r is not None for r in row) for row in zip(*columns, strict=True)]
    counted = [t for t, ok in zip(total, applies, strict=True) if ok]
    m, s = mean(counted), std(counted)
    return [(t - m) / (s + 1e-4) if ok else 0.0 for t, ok in zip(total, applies, strict=True)]


def pass_at_k(success, groups, k):
    """By enumerating every subset of k of the group."""
    out = []
    for i, group in enumerate(groups):
        mine = [j for j, g in enumerate(groups) if g == group]
        if len(mine) < k:
            out.append(0.0)
            continue
        subsets = list(combinations(mine, k))
        reward = {s: float(any(success[j] for j in s)) for s in subsets}
        m = mean(list(reward.values()))
        s = math.sqrt(mean([(r - m) ** 2 for r in reward.values()]))
        with_me = [reward[t] for t in subsets if i in t]
        out.append(0.0 if s == 0 else (mean(with_me) - m) / s)
    return out


def turn_advantage(rows, masks, groups):
    """Rows of dense rewards, or None for a row that was not scored."""
    turns = []
    for mask in masks:
        index, number, before = [], -1, False
        for now in mask:
            if now and not before:
                number += 1
            before = now
            index.append(max(number, 0))
        turns.append(index)
    sums = []
    for rewards, index in zip(rows, turns, strict=True):
        count = max(index, default=-1) + 1
        sums.append(
            None
            if rewards is None
            else [
                sum(r for r, t in zip(rewards, index, strict=True) if t == n) for n in range(count)
            ]
        )
    out = []
    for own, index, group in zip(sums, turns, groups, strict=True):
        if own is None:
            out.append([0.0] * len(index))
            continue
        pool = [v for s, g in zip(sums, groups, strict=True) if g == group and s for v in s]
        flat = len(set(pool)) < 2
        normal = [0.0 if flat else (v - mean(pool)) / (std(pool) + 1e-4) for v in own]
        out.append([sum(normal[t:]) for t in index])
    return out


# Corrections and filters.


def correction(train, sampler, level, mode, upper, lower, max_k3=math.inf):
    out = []
    for row in zip(train, sampler, strict=True):
        logs = [a - b for a, b in zip(*row, strict=True)]
        if mean([math.exp(x) - x - 1 for x in logs]) > max_k3:
            out.append([0.0] * len(logs))
            continue
        if level == "sequence":
            logs = [mean(logs)] * len(logs)
        if level == "k3":
            logs = [0.0] * len(logs)
        weights = [math.exp(x) for x in logs]
        if mode == "truncate":
            out.append([min(max(w, lower), upper) for w in weights])
        else:
            out.append([w if lower <= w <= upper else 0.0 for w in weights])
    return out


def off_policy_keep(lp, sampler, adv, threshold):
    out = []
    for row, sampler_row, as_ in zip(lp, sampler, adv, strict=True):
        drift = mean([b - a for a, b in zip(row, sampler_row, strict=True)])
        out.append([a >= 0 or drift <= threshold for a in as_])
    return out


def quantile(values, q):
    values = sorted(values)
    position = q * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (position - low) * (values[high] - values[low])


def effective_fraction(lp, old):
    flat = [r for row in ratios(lp, old) for r in row]
    return sum(flat) ** 2 / (len(flat) * sum(r * r for r in flat)) if flat else 1.0
