/* load.c - a machine from files, or this one, made whole; and a part of its GPUs. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/machine.h"

enum { MOST_BYTES = 64 << 20 };

/* A whole file, "-" for standard input. */
static int load_file(const char *path, char **text, size_t *length, char *why, size_t size)
{
    bool standard = strcmp(path, "-") == 0;
    FILE *f = standard ? stdin : fopen(path, "re");
    size_t room = 0, n = 0, got = 1;
    char *all = NULL;
    if (!f) {
        snprintf(why, size, "cannot open %s: %s", path, strerror(errno));
        return -errno;
    }
    while (got > 0 && n <= MOST_BYTES) {
        if (room - n < 65536) {
            char *more = realloc(all, room = 2 * room + 131072);
            if (!more)
                break;
            all = more;
        }
        got = fread(all + n, 1, room - n, f);
        n += got;
    }
    bool failed = ferror(f) || !all || got > 0;
    int err = errno;
    if (!standard)
        fclose(f);
    *text = all;
    *length = n;
    if (!failed)
        return 0;
    free(all);
    if (n > MOST_BYTES)
        snprintf(why, size, "%s is larger than 64 MB", path);
    else
        snprintf(why, size, "cannot read %s: %s", path, strerror(err));
    return -EIO;
}

static int load_xml(const char *xml, struct tly_machine *m, char *why, size_t size)
{
    char *text = NULL, said[512];
    size_t length = 0;
    int err = load_file(xml, &text, &length, why, size);
    if (err)
        return err;
    err = tly_machine_read(text, length, NULL, m, said, sizeof said);
    free(text);
    if (err)
        snprintf(why, size, "%s: %s", xml, said);
    return err;
}

static int load_links(const char *links, struct tly_machine *m, char *why, size_t size)
{
    char *text = NULL, said[512];
    size_t length = 0;
    int err = load_file(links, &text, &length, why, size);
    if (err)
        return err;
    err = tly_machine_links(text, length, m, said, sizeof said);
    free(text);
    if (err)
        snprintf(why, size, "%s, %s", links, said);
    return err;
}

int tly_machine_load(const char *xml, const char *links, struct tly_machine *m, char *why, size_t size)
{
    const char *file = links ? links : xml;
    char said[512];
    int err = xml ? load_xml(xml, m, why, size) : tly_machine_detect(m, why, size);
    if (!err && links)
        err = load_links(links, m, why, size);
    if (err)
        return err;
    err = tly_machine_finish(m, said, sizeof said);
    if (err)
        snprintf(why, size, "%s%s%s", file ? file : "", file ? ": " : "", said);
    return err;
}

void tly_machine_pick(const struct tly_machine *m, const uint8_t gpu[], int count, struct tly_machine *out)
{
    *out = *m;
    out->gpus = count;
    memset(out->nvlink, 0, sizeof out->nvlink);
    for (int a = 0; a < count; a++) {
        out->gpu[a] = m->gpu[gpu[a]];
        out->gpu[a].peers = 0;
        for (int b = 0; b < count; b++) {
            out->nvlink[a][b] = m->nvlink[gpu[a]][gpu[b]];
            out->gpu[a].peers |= (m->gpu[gpu[a]].peers >> gpu[b] & 1) << b;
        }
    }
}
