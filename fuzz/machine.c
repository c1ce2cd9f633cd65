/* machine.c - fuzzes what describes a machine: hwloc's XML, and the list of links behind it.
 *
 * The XML ends at the first NUL, the list follows.  Whatever comes is refused with a sentence, or is a machine; that has a
 * plan unless its switches are too deep, and the plan stands its replay. */
#include "machine/machine.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "fuzz.h"
#include "inside/inside.h"

static bool plain(const char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            return false;
    return true;
}

static void names_are_plain(const struct tly_machine *m)
{
    for (int i = 0; i < m->gpus; i++)
        require(plain(m->gpu[i].name) && plain(m->gpu[i].address));
    for (int i = 0; i < m->cards; i++)
        require(plain(m->card[i].name) && plain(m->card[i].rdma));
    for (int i = 0; i < m->notes; i++)
        require(plain(m->note[i]));
}

static void plan(const struct tly_machine *m, uint8_t salt, unsigned may)
{
    struct tly_inside p;
    struct tly_inside_job job = {.bytes = 1000003, .traffic = salt % 4 / 2.0};
    char why[256] = "";
    int err = tly_inside_plan(m, &job, may, &p);
    require(err == 0 || err == -E2BIG);
    if (err)
        return;
    require(isfinite(p.seconds) && p.seconds >= 0);
    if (tly_inside_check(m, &p, why, sizeof why) != 0) {
        fprintf(stderr, "%s\n", why);
        abort();
    }
    tly_inside_finish(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tly_machine m;
    char why[512] = "";
    const uint8_t *end = size ? memchr(data, '\0', size) : NULL;
    size_t length = end ? (size_t)(end - data) : size;
    int err = tly_machine_read((const char *)data, length, NULL, &m, why, sizeof why);
    require(err <= 0 && (err == 0 || (why[0] && plain(why))));
    if (err)
        return 0;
    if (end) {
        why[0] = '\0';
        err = tly_machine_links((const char *)end + 1, size - length - 1, &m, why, sizeof why);
        require(err <= 0 && (err == 0 || (why[0] && plain(why))));
    }
    if (!err)
        err = tly_machine_finish(&m, why, sizeof why);
    names_are_plain(&m);
    for (unsigned may = 0; !err && may <= TLY_MAY_ALL && m.gpus <= 24;
         may += TLY_MAY_ALL) /* a plan takes long for more */
        plan(&m, size ? data[size - 1] : 0, may);
    return 0;
}
