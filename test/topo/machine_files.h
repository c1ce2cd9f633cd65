/* machine_files.h - for tests: the machines of test/topo/machines, made whole. */
#ifndef TLY_MACHINE_FILES_H
#define TLY_MACHINE_FILES_H

#include <stdio.h>
#include <stdlib.h>

#include "machine/machine.h"

/* A file of test/topo/machines; NULL: there is none. */
static inline char *machine_file(const char *name, const char *suffix, size_t *length)
{
    char path[512], *text = NULL;
    size_t room = 0;
    snprintf(path, sizeof path, TLY_TEST_MACHINES "/%s.%s", name, suffix);
    FILE *f = fopen(path, "re");
    ssize_t n = f ? getdelim(&text, &room, '\0', f) : -1;
    if (f)
        fclose(f);
    *length = n < 0 ? 0 : (size_t)n;
    return text;
}

static inline int load_machine(const char *name, struct tly_machine *m, char *why, size_t size)
{
    size_t xml_length, links_length;
    char *xml = machine_file(name, "xml", &xml_length), *links = machine_file(name, "links", &links_length);
    int err = tly_machine_read(xml ? xml : "", xml_length, NULL, m, why, size);
    if (!err && links)
        err = tly_machine_links(links, links_length, m, why, size);
    if (!err)
        err = tly_machine_finish(m, why, size);
    free(xml);
    free(links);
    return err;
}

#endif
