"""The decode ladder: attention of one new token of each sequence with its cache, step by step.

                          share of the floor, S = 1024 / 4096
    head_per_lane         11 / 14 %   a query head on each partition: 4 of 128 lanes pass over all scores
    key_per_lane          29 / 94 %   a key on each partition: 128 lanes, and no transposes of the weights
    group_of_sequences    76 / 94 %   one softmax, and one DMA for keys and values, for several sequences

The floor is the time in which both caches come from HBM, of 16 sequences with 4 heads on 1, bfloat16, on trn2; shares
are of the predicted time in program order.

`nki_kernels.attention_decode` goes on from there: it rotates, normalises and writes the new tokens, takes any size, and
lets the stages of neighbouring groups overlap.
"""

from nki_kernels.ladder.decode.group_of_sequences import group_of_sequences
from nki_kernels.ladder.decode.head_per_lane import head_per_lane
from nki_kernels.ladder.decode.key_per_lane import key_per_lane

__all__ = ["group_of_sequences", "head_per_lane", "key_per_lane"]
