/* words.h - sentences about ranks that disagree.  No state, no I/O. */
#ifndef TLY_WORDS_H
#define TLY_WORDS_H

#include <stdbool.h>
#include <stddef.h>

/* A spec in words (comm/op/tensor.c) is a title, a bar and the rest: "all_reduce no. 16|float32 [3] sum".  The title may have
 * bars too, the rest has none.  Have both texts the same title? */
bool tly_words_same_title(const char *a, const char *b);

/* Append what the ranks mean, and return where the text ends, or would.  ranks: "rank 1".
 *
 * first: the text of the first ranks, NULL for these themselves, where all texts have one title: then only the words that
 * differ from the first's, as in "float32 [3] sum on rank 0, [4] on rank 1".
 * whole: titles differ: "rank 0: all_reduce no. 16: float32 [3] sum; rank 1: broadcast no. 16: float32 [3] from rank 0". */
size_t tly_words_append(char *out, size_t len, size_t at, const char *first, const char *text,
                        const char *ranks, bool whole);

#endif
