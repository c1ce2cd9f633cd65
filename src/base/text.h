/* text.h - quantities in words. */
#ifndef TLY_TEXT_H
#define TLY_TEXT_H

#include <stdint.h>

enum { TLY_BYTES_TEXT = 16 };

/* "0 B", "12.5 KB", "3 GB": three digits, powers of 1000.  Returns `text`. */
const char *tly_bytes_text(uint64_t bytes, char text[TLY_BYTES_TEXT]);

#endif
