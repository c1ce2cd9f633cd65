/* text.h - quantities in words, and texts that a terminal may get. */
#ifndef TLY_TEXT_H
#define TLY_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TLY_BYTES_TEXT = 16, TLY_NUMBER_TEXT = 24 };

/* "0 B", "12.5 KB", "3 GB": three digits, powers of 1000.  Returns `text`. */
const char *tly_bytes_text(uint64_t bytes, char text[TLY_BYTES_TEXT]);

/* "0.123", "12.3", "1010": three digits, and all that stand before the point.  For x below 1e15.  Returns `text`. */
const char *tly_number_text(double x, char text[TLY_NUMBER_TEXT]);

/* Append the numbers from first to last to a list of numbers: "0-3, 7".  Returns where the text ends.  A list that hardly
 * has room is not continued. */
size_t tly_text_append_range(char *out, size_t len, size_t at, uint32_t first, uint32_t last);

/* Put '?' in place of each control character, those of two bytes in UTF-8 included: a terminal would obey them.  Returns
 * whether there was one. */
bool tly_text_clean(char *text);

#endif
