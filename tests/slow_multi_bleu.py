"""Moses' BLEU of tokenised text, written to be checked by eye."""

from __future__ import annotations

import math


def words(line):
    """Words between blanks; no other character parts them."""
    return [word for word in line.replace("\t", " ").split(" ") if word]


def slow_multi_bleu(hypotheses, references):
    """The line that multi-bleu.perl prints, for one reference."""
    correct, total = [0] * 4, [0] * 4
    hypothesis_length = reference_length = 0
    for hypothesis, reference in zip(hypotheses, references):
        hypothesis, reference = words(hypothesis), words(reference)
        hypothesis_length += len(hypothesis)
        reference_length += len(reference)
        for order in range(1, 5):
            left = [reference[start : start + order] for start in range(len(reference) - order + 1)]
            for start in range(len(hypothesis) - order + 1):
                total[order - 1] += 1
                gram = hypothesis[start : start + order]
                if gram in left:  # each n-gram of the reference counts once
                    left.remove(gram)
                    correct[order - 1] += 1
    precisions = [right / of if of else 0 for right, of in zip(correct, total)]
    penalty = 1.0
    if hypothesis_length < reference_length:
        penalty = math.exp(1 - reference_length / hypothesis_length)
    bleu = 0.0
    if all(precisions):
        bleu = penalty * math.exp(sum(math.log(precision) for precision in precisions) / 4)
    shown = "/".join(f"{100 * precision:.1f}" for precision in precisions)
    return (
        f"BLEU = {100 * bleu:.2f}, {shown} (BP={penalty:.3f}, "
        f"ratio={hypothesis_length / reference_length:.3f}, hyp_len={hypothesis_length}, "
        f"ref_len={reference_length})"
    )
