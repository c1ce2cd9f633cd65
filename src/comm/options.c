/* options.c - struct tally_options of callers that were compiled against another header than this library.
 *
 * `size` says how much of it the caller has.  Fields that an older header lacks read as zero, which stands for the default
 * of each.  A newer header's fields may only be zero: what they ask for this library cannot do. */
#include <errno.h>
#include <string.h>

#include "base/error.h"
#include "comm/submit.h"

/* No header was without the first fields, and none will be so large: that is a size nobody has set. */
enum { LEAST = offsetof(struct tally_options, ndim), MOST = 1024 };

static int options_take_other(const struct tally_options **options, struct tally_options *own)
{
    const struct tally_options *given = *options;
    const size_t size = given->size, known = sizeof *own;
    if (size < LEAST || size > MOST)
        return tly_fail(EINVAL, "tally_options.size is %zu: set it to sizeof(struct tally_options)", size);
    for (size_t i = known; i < size; i++)
        if (((const unsigned char *)given)[i])
            return tly_fail(
                EINVAL,
                "tally_options has something set behind its first %zu bytes, and libtally %s knows no "
                "more: install the libtally that the program was compiled for, or a newer one",
                known, TALLY_VERSION);
    *own = (struct tally_options){0};
    memcpy(own, given, size < known ? size : known);
    own->size = known;
    *options = own;
    return 0;
}

int tly_options_take(const struct tally_options **options, struct tally_options *own)
{
    return !*options || (*options)->size == sizeof *own ? 0 : options_take_other(options, own);
}
