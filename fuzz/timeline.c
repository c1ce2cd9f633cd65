/* timeline.c - fuzzes the reader of timelines: whatever comes is refused with a sentence, or is a timeline
 * that can be merged or not, and is the same again when written and read. */
#include "trace/timeline.h"

#include <string.h>

#include "fuzz.h"

static int read_from(const void *data, size_t size, struct tly_timeline *t)
{
    char why[256] = "";
    FILE *in = fmemopen((void *)data, size, "r");
    require(in != NULL);
    int err = tly_timeline_read(in, t, why, sizeof why);
    fclose(in);
    require(err <= 0 && (err == 0 || why[0] != '\0'));
    return err;
}

static char *write_to(struct tly_timeline *t, size_t *size)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, size);
    require(out != NULL && tly_timeline_write(out, t) == 0);
    fclose(out);
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tly_timeline t = {0}, again = {0};
    char why[256] = "";
    if (size == 0)
        return 0;
    if (read_from(data, size, &t) == 0) {
        size_t first, second, which = 0;
        char *text = write_to(&t, &first);
        require(read_from(text, first, &again) == 0 && again.count == t.count);
        char *other = write_to(&again, &second);
        require(first == second && memcmp(text, other, first) == 0);
        free(text);
        free(other);
        int64_t slack;
        if (tly_timeline_merge(&t, &slack, &which, why, sizeof why) != 0)
            require(which < t.count && why[0] != '\0');
    }
    tly_timeline_finish(&t);
    tly_timeline_finish(&again);
    return 0;
}
