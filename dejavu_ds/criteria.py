"""Which units of a layer a token needs: the labels that predictors learn, and how much each one counts.

    unit      criterion      needed is
    mlp       -              a neuron whose pre-activation is above `mlp_threshold`
    heads     norm           a head among the largest by the norm of its output (Deja Vu, arXiv:2310.17157, 4.2)
    heads     contribution   ... by the norm of what it adds to the residual stream, its output through out_proj
    heads     plainact       ... by the sum over its outputs of |activation * gradient| of the language-model loss
                             (ShadowLLM, arXiv:2406.16635); needs a backward pass in collection

Of heads the `head_label_density` share with the largest score are labelled, token by token. With `head_loss` "size" a
head's predictor learns no label but how large the score is, `log_sizes`: one threshold then asks the same of every
token, and those that need more heads keep more.
"""

import torch

CRITERIA = ("norm", "plainact", "contribution")
MLP_WEIGHTS = ("contribution", "plainact", "none")
HEAD_LOSSES = ("size", "label")


def head_scores(
    criterion: str,
    outputs: torch.Tensor,
    sensitivity: torch.Tensor | None = None,
    gram: torch.Tensor | None = None,
) -> torch.Tensor:
    """How much each head matters to each token, [..., H].

    outputs      [..., H, head_dim] fp32
    sensitivity  [..., H] recorded sums of |activation * gradient|, for "plainact"
    gram         [H, head_dim, head_dim] from `gram_matrices`, for "contribution"
    """
    if criterion == "norm":
        return outputs.norm(dim=-1)
    if criterion == "plainact":
        return sensitivity.float()
    # |W o|^2 = o' (W' W) o: no vector of the width D is formed.
    return (torch.einsum("...hi,hij->...hj", outputs, gram) * outputs).sum(-1).clamp(min=0).sqrt()


def log_sizes(criterion: str, scores: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Log of the squared share of each head in the whole, [t, H]; -inf for a score of 0.

    scores    [t, H] from `head_scores`
    residual  [t] squared norm of the residual stream after the block: the whole of a "contribution". The other scores
              are no lengths in the stream, and their whole is the sum over the token's heads
    """
    if criterion == "contribution":
        return 2 * scores.log() - residual.clamp(min=1e-12).log()[:, None]
    return 2 * (scores / scores.sum(-1, keepdim=True).clamp(min=1e-30)).log()


def gram_matrices(out_weight: torch.Tensor, group: int) -> torch.Tensor:
    """out_proj's weight [D, H * head_dim] -> W_h' W_h of each head, [H, head_dim, head_dim] fp32."""
    by_head = out_weight.detach().float().unflatten(1, (-1, group))
    return torch.einsum("dhi,dhj->hij", by_head, by_head)


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row of scores [t, H], as [t, H] bool."""
    top = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, top, True)
