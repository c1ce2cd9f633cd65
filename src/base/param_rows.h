/* param_rows.h - the rows of the table of settings, for param.c, which reads settings, and param_print.c, which prints them.
 *
 * All of it is constant. */
#ifndef TLY_PARAM_ROWS_H
#define TLY_PARAM_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/param.h"

enum tly_param_type { STR, INT, SIZE, RATE, SECS };

struct tly_param_row {
    const char *name;
    enum tly_param_type type;
    bool agreed;
    size_t offset; /* in struct tly_params */
    const char *text;
    double number; /* the default: text for STR, number for all others */
    double min, max;
    const char *help;
};

#define TLY_PARAM_ONE(...) +1
enum { TLY_PARAM_ROWS = 0 TLY_PARAM_TABLE(TLY_PARAM_ONE) };
#undef TLY_PARAM_ONE
extern const struct tly_param_row tly_param_rows[TLY_PARAM_ROWS];

/* What the table has no column for. */
struct tly_param_rule {
    const char *name;
    const char *const *choices; /* NULL-terminated: the only valid words */
    uint32_t multiple;          /* of this many bytes */
    uint32_t shortest;          /* bytes */
    bool secret;
    bool hidden; /* for tests and for our own launchers: in no list */
};

static inline void *tly_param_field(const struct tly_params *p, const struct tly_param_row *row)
{
    return (char *)p + row->offset;
}

const struct tly_param_rule *tly_param_rule_of(const struct tly_param_row *row);
/* "64K" */
const char *tly_param_size_text(uint64_t bytes, char buf[32]);
/* A number of this type as people write it. */
const char *tly_param_number_text(enum tly_param_type type, double x, char buf[32]);
/* The values that a row allows, such as "4K to 64M, a multiple of 64". */
const char *tly_param_valid_text(const struct tly_param_row *row, char *buf, size_t len);
/* The value as it may be read back, "" for an unset text. */
void tly_param_value_text(const struct tly_params *p, const struct tly_param_row *row, char *buf, size_t len);

#endif
