"""What sampling parameters mean, token by token in plain Python, and a test of goodness of fit."""

import math
from collections import Counter


def shaped(logits, params, prompt=(), answer=(), eos=(), allowed=None):
    """Logits after everything that comes before temperature; -inf is forbidden."""
    values = [float(x) for x in logits]
    for token, value in params.logit_bias:
        values[token] += value
    for token in {*prompt, *answer}:
        r = params.repetition_penalty
        values[token] = values[token] / r if values[token] > 0 else values[token] * r
    for token, count in Counter(answer).items():
        values[token] -= params.frequency_penalty * count
        values[token] -= params.presence_penalty
    grammatical = set(range(len(values))) if allowed is None else set(allowed)
    left = grammatical - forbidden(params, answer, eos) or grammatical
    return [x if token in left else -math.inf for token, x in enumerate(values)]


def forbidden(params, answer, eos=()):
    ids = set()
    if len(answer) < params.min_tokens:
        ids |= {*eos, *params.stop_token_ids}
    for *begin, last in params.bad_words:
        if tuple(answer[len(answer) - len(begin) :]) == tuple(begin) and len(begin) <= len(answer):
            ids.add(last)
    return ids


def distribution(values, params, slack=0.0):
    """Probability by token, in the order in which the cumulative sum runs.

    ``slack`` moves the limits of ``min_p`` and ``top_p`` by that share.
    """
    best = max(values)
    p = {t: math.exp((x - best) / params.temperature) for t, x in enumerate(values)}
    p = {t: x for t, x in p.items() if x >= min(1.0, params.min_p * (1 + slack)) and x > 0}
    if params.top_k or params.top_p < 1:
        p = dict(sorted(p.items(), key=lambda item: (-values[item[0]], item[0])))
    if params.top_k:
        p = dict(list(p.items())[: params.top_k])
    if params.top_p < 1:
        limit, held, kept = params.top_p * (1 + slack) * math.fsum(p.values()), 0.0, {}
        for token, x in p.items():
            kept[token] = x
            held += x
            if held >= limit:
                break
        p = kept
    total = math.fsum(p.values())
    return {token: x / total for token, x in p.items()}


def possible(values, params, number):
    """The tokens that ``number`` in [0, 1) may choose: one, or two where rounding decides."""
    if params.temperature == 0:
        return {values.index(max(values))}
    found = set()
    for slack in (-1e-12, 0.0, 1e-12):
        p = distribution(values, params, slack)
        for moved in (number - 1e-12, number, number + 1e-12):
            held = 0.0
            for token, share in p.items():
                held += share
                if held > moved:
                    found.add(token)
                    break
            else:
                found.add(list(p)[-1])
    return found


def quantile(degrees, z=5.0):
    """Chi-square quantile of the normal quantile ``z`` (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + z * math.sqrt(part)) ** 3


def fits(counts, shares):
    """Whether counted outcomes follow ``shares`` (probability by outcome): chi-square, 5 sigma.

    Outcomes expected fewer than 8 times are one cell.
    """
    n = sum(counts.values())
    if not set(counts) <= {outcome for outcome, share in shares.items() if share > 0}:
        return False
    cells = [(counts[o], n * p) for o, p in shares.items() if n * p >= 8]
    rest = sum(n * p for p in shares.values() if n * p < 8)
    if rest > 0:
        cells.append((sum(counts[o] for o, p in shares.items() if n * p < 8), rest))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return len(cells) == 1 or statistic < quantile(len(cells) - 1)
