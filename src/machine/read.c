/* read.c - a machine from hwloc's XML: the objects of the file, then the places where ways to the processor meet.
 *
 * Nothing of it goes through hwloc's own import: that trusts its input, and what is needed here are a dozen attributes.
 * The live machine comes the same way, by hwloc's export (detect.c), so a file shows what its machine would. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/machine.h"
#include "machine/xml.h"

enum { MAX_ITEMS = 1 << 17, MAX_BYTES = 64 << 20, MAX_BANDWIDTHS = 1024 };

enum reading_type { OTHER, CORE, NUMA, MEMORY_CACHE, HOST_BRIDGE, BRIDGE, DEVICE, OS_DEVICE };

/* An object of the file.  Parents stand before their children. */
struct item {
    int parent;
    enum reading_type type;
    int number;          /* os_index */
    uint64_t gp, memory; /* hwloc's own number; local memory */
    char address[24];
    unsigned class, vendor;
    double speed;           /* of the link, bytes/s; 0: not known */
    int below, ways;        /* GPUs and cards below it, and children with some */
    char name[48];          /* of a device: what it is; of one of the system: what it is called */
    char net[32], rdma[32]; /* of a card */
    int ports;              /* network interfaces of a card */
    int node;               /* in the machine, of the first NUMA node that hangs on this object; -1: none */
    int place;              /* in the machine, of a switch or a card; -1: none */
    int first, last;        /* of a card's function the device's first; below an object the card read last */
};

struct topo_reading {
    struct item *item;
    int items, room, open[TLY_XML_DEPTH];
    tly_link_look *look;
    bool machine;   /* an object of this type has been read, and nothing above it */
    bool bandwidth; /* within <memattr name="Bandwidth"> */
    int bandwidths;
    struct tly_machine *m;
    char *why;
    size_t size;
};

static int reading_refuse(struct topo_reading *r, int err, const char *what, const char *of)
{
    snprintf(r->why, r->size, "%s%s", what, of);
    return err;
}

/* --- numbers ------------------------------------------------------------------------------------------------ */

static uint64_t reading_whole(const char *text)
{
    char *end;
    if (!isdigit((unsigned char)*text))
        return 0;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    return errno || *end ? 0 : n;
}

/* A rate with a point, of hwloc's: GB/s.  -1: no number, or none that a link could have. */
static double reading_decimal(const char *text)
{
    double whole_part = 0, step = 1;
    const char *p = text;
    for (; isdigit((unsigned char)*p); p++)
        whole_part = whole_part * 10 + (*p - '0');
    if (p == text)
        return -1;
    if (*p == '.')
        for (p++; isdigit((unsigned char)*p); p++)
            whole_part += (*p - '0') * (step /= 10);
    return *p || !(whole_part <= 1e5) ? -1 : whole_part;
}

/* DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as hwloc writes it. */
static bool reading_good_address(const char *text)
{
    unsigned domain, bus, device, function;
    int n = 0;
    return sscanf(text, "%8x:%2x:%2x.%1x%n", &domain, &bus, &device, &function, &n) == 4 && !text[n] &&
           strlen(text) < 24;
}

/* --- objects ------------------------------------------------------------------------------------------------ */

static enum reading_type reading_type_of(const struct tly_xml *x, const char *name)
{
    char which[16];
    if (strcmp(name, "Bridge") == 0) {
        tly_xml_get(x, "bridge_type", which, sizeof which);
        return strncmp(which, "0-", 2) == 0 ? HOST_BRIDGE : BRIDGE;
    }
    return strcmp(name, "Core") == 0       ? CORE
           : strcmp(name, "NUMANode") == 0 ? NUMA
           : strcmp(name, "MemCache") == 0 ? MEMORY_CACHE
           : strcmp(name, "PCIDev") == 0   ? DEVICE
           : strcmp(name, "OSDev") == 0    ? OS_DEVICE
                                           : OTHER;
}

/* The attributes of a bridge or a device on the bus. */
static int reading_read_bus(struct topo_reading *r, const struct tly_xml *x, struct item *i)
{
    char text[64];
    if (!tly_xml_get(x, "pci_busid", i->address, sizeof i->address) || !reading_good_address(i->address))
        return reading_refuse(r, -EINVAL, "a device has no PCI address such as 0000:3b:00.0, but ",
                              i->address[0] ? i->address : "none");
    for (char *c = i->address; *c; c++)
        *c = (char)tolower((unsigned char)*c);
    if (tly_xml_get(x, "pci_type", text, sizeof text))
        sscanf(text, "%4x [%4x:", &i->class, &i->vendor);
    if (tly_xml_get(x, "pci_link_speed", text, sizeof text)) {
        double speed = reading_decimal(text);
        if (speed < 0)
            return reading_refuse(r, -EINVAL, "a PCI link has no speed in GB/s such as 15.75, but ",
                                  text[0] ? text : "none");
        i->speed = speed * 1e9;
    }
    double most = r->look ? r->look(i->address) : 0;
    if (most > 0)
        i->speed = most;
    return 0;
}

static struct item *reading_ancestor(struct topo_reading *r, int of, enum reading_type type)
{
    for (; r->item && of >= 0; of = r->item[of].parent)
        if (r->item[of].type == type)
            return &r->item[of];
    return NULL;
}

/* A network interface, or an RDMA device, belongs to its card. */
static void reading_read_system_device(struct topo_reading *r, const struct tly_xml *x, struct item *i)
{
    char which[16];
    struct item *card = reading_ancestor(r, i->parent, DEVICE);
    tly_xml_get(x, "osdev_type", which, sizeof which);
    tly_xml_get(x, "name", i->name, sizeof i->name);
    if (!card || !i->name[0])
        return;
    if (strcmp(which, "2") == 0) {
        card->ports++;
        if (!card->net[0])
            memcpy(card->net, i->name, sizeof card->net - 1);
    } else if (strcmp(which, "3") == 0 && !card->rdma[0])
        memcpy(card->rdma, i->name, sizeof card->rdma - 1);
}

static int reading_read_object(struct topo_reading *r, const struct tly_xml *x, int depth)
{
    char type[32], number[24];
    if (r->items == MAX_ITEMS)
        return reading_refuse(r, -E2BIG, "the machine has more than 131072 objects", "");
    if (r->items == r->room) {
        int room = r->room ? 2 * r->room : 256;
        struct item *more = realloc(r->item, (size_t)room * sizeof *more);
        if (!more)
            return reading_refuse(r, -ENOMEM, "out of memory", "");
        r->item = more;
        r->room = room;
    }
    tly_xml_get(x, "type", type, sizeof type);
    r->machine |= depth == 1 && strcmp(type, "Machine") == 0;
    struct item *i = &r->item[r->items];
    *i = (struct item){
        .parent = r->open[depth - 1], .type = reading_type_of(x, type), .node = -1, .place = -1, .last = -1};
    r->open[depth] = r->items++;
    tly_xml_get(x, "os_index", number, sizeof number);
    i->number = (int)(reading_whole(number) & 0xffffff);
    tly_xml_get(x, "gp_index", number, sizeof number);
    i->gp = reading_whole(number);
    tly_xml_get(x, "local_memory", number, sizeof number);
    i->memory = reading_whole(number);
    if (i->type == OS_DEVICE)
        reading_read_system_device(r, x, i);
    return i->type == BRIDGE || i->type == DEVICE ? reading_read_bus(r, x, i) : 0;
}

static void reading_read_info(struct topo_reading *r, const struct tly_xml *x, int depth)
{
    char name[32];
    int of = r->open[depth - 1];
    struct item *device = of < 0 ? NULL : reading_ancestor(r, of, DEVICE);
    tly_xml_get(x, "name", name, sizeof name);
    if (device && (strcmp(name, "GPUModel") == 0 || (strcmp(name, "PCIDevice") == 0 && !device->name[0])))
        tly_xml_get(x, "value", device->name, sizeof device->name);
}

/* Of a table of memory attributes: what a node's memory carries, in MiB/s. */
static void reading_read_bandwidth(struct topo_reading *r, const struct tly_xml *x)
{
    char text[32];
    tly_xml_get(x, "target_obj_gp_index", text, sizeof text);
    uint64_t gp = reading_whole(text);
    tly_xml_get(x, "value", text, sizeof text);
    double rate = (double)reading_whole(text) * (1 << 20);
    for (int i = 0; i < r->items; i++)
        if (r->item[i].type == NUMA && r->item[i].gp == gp && rate > 0 && rate < 1e15 &&
            rate > r->item[i].speed)
            r->item[i].speed = rate;
}

static int reading_read_element(struct topo_reading *r, const struct tly_xml *x)
{
    char text[32];
    int depth = x->depth - 1; /* of this element; the root's is 0 */
    r->open[depth] = depth ? r->open[depth - 1] : -1;
    if (depth == 0) {
        if (!tly_xml_is(x, "topology"))
            return reading_refuse(r, -EINVAL, "this is no XML of hwloc's: it does not begin with <topology>",
                                  "");
        tly_xml_get(x, "version", text, sizeof text);
        if (strncmp(text, "2.", 2) != 0)
            return reading_refuse(r, -EINVAL,
                                  "this is not the XML of hwloc 2 (lstopo writes it): its version is ",
                                  text[0] ? text : "not given");
        return 0;
    }
    if (tly_xml_is(x, "object"))
        return reading_read_object(r, x, depth);
    if (tly_xml_is(x, "info"))
        reading_read_info(r, x, depth);
    else if (tly_xml_is(x, "memattr")) {
        tly_xml_get(x, "name", text, sizeof text);
        r->bandwidth = strcmp(text, "Bandwidth") == 0;
    } else if (r->bandwidth && r->bandwidths++ < MAX_BANDWIDTHS && tly_xml_is(x, "memattr_value"))
        reading_read_bandwidth(r, x);
    return 0;
}

/* --- NUMA nodes --------------------------------------------------------------------------------------------- */

/* The first node that is a child of an object, or of the nearest above it that has one; -1: none.  Memory hangs beside
 * what it belongs to, so that is where something is. */
static int reading_node_near(const struct topo_reading *r, int of)
{
    for (; of >= 0; of = r->item[of].parent)
        if (r->item[of].node >= 0)
            return r->item[of].node;
    return -1;
}

static int reading_take_nodes(struct topo_reading *r)
{
    struct tly_machine *m = r->m;
    for (int i = 0; i < r->items; i++) {
        struct item *n = &r->item[i];
        if (n->type != NUMA || n->parent < 0)
            continue;
        if (m->nodes == TLY_MAX_NODES)
            return reading_refuse(r, -E2BIG, "the machine has more than 32 NUMA nodes", "");
        m->node[m->nodes] = (struct tly_node){.number = n->number, .memory = n->memory};
        if (n->speed > 0)
            m->node[m->nodes].bandwidth = (struct tly_rate){n->speed, TLY_FOUND};
        int at = n->parent;
        while (r->item[at].parent >= 0 && r->item[at].type == MEMORY_CACHE)
            at = r->item[at].parent;
        if (r->item[at].node < 0)
            r->item[at].node = m->nodes;
        m->nodes++;
    }
    for (int i = 0; i < r->items; i++) {
        int node = r->item[i].type == CORE ? reading_node_near(r, i) : -1;
        if (r->item[i].type == CORE && m->nodes)
            m->node[node < 0 ? 0 : node].cores++;
    }
    return 0;
}

/* --- the tree ----------------------------------------------------------------------------------------------- */

static bool reading_is_gpu(const struct item *i)
{
    bool nvidia = i->vendor == 0x10de && i->class >> 8 == 0x03;
    bool amd = i->vendor == 0x1002 && (i->class == 0x0380 || i->class == 0x1200);
    return i->type == DEVICE && (nvidia || amd);
}

static bool reading_is_card(const struct item *i)
{
    return i->type == DEVICE && i->class >> 8 == 0x02;
}

/* Functions of one device share its place on the bus. */
static bool reading_same_device(const struct item *a, const struct item *b)
{
    return a->parent == b->parent && strncmp(a->address, b->address, strcspn(a->address, ".") + 1) == 0;
}

/* Finds the function of each card that stands for it, the first.  Functions of one device follow one another. */
static void reading_find_functions(struct topo_reading *r)
{
    for (int i = 0; i < r->items; i++) {
        struct item *at = &r->item[i];
        at->first = i; /* also of a card that nothing is above */
        if (!reading_is_card(at) || at->parent < 0)
            continue;
        int *last = &r->item[at->parent].last;
        at->first = *last >= 0 && reading_same_device(&r->item[*last], at) ? r->item[*last].first : i;
        *last = i;
    }
}

/* How many devices are below each object, and in how many directions. */
static void reading_count_below(struct topo_reading *r)
{
    for (int i = r->items - 1; i >= 0; i--) {
        struct item *at = &r->item[i];
        if (reading_is_gpu(at) || (reading_is_card(at) && at->first == i))
            at->below++;
        if (at->below && at->parent >= 0) {
            r->item[at->parent].below += at->below;
            r->item[at->parent].ways++;
        }
    }
}

static double reading_narrower(double a, double b)
{
    return a <= 0 || (b > 0 && b < a) ? b : a;
}

/* From an object upwards: the nearest place where ways meet, and the narrowest link before it. */
struct way {
    int parent, node;
    double speed;
};

static int reading_make_switch(struct topo_reading *r, int i, int *made);

static int reading_follow(struct topo_reading *r, int i, struct way *w)
{
    *w = (struct way){.parent = -1, .node = -1, .speed = r->item[i].speed};
    for (i = r->item[i].parent; i >= 0; i = r->item[i].parent) {
        const struct item *at = &r->item[i];
        if (at->type == BRIDGE && at->ways > 1) {
            int err = reading_make_switch(r, i, &w->parent);
            if (!err)
                w->node = r->m->sw[w->parent].node;
            return err;
        }
        if (at->type == BRIDGE)
            w->speed = reading_narrower(w->speed, at->speed);
        else if (at->type != HOST_BRIDGE) {
            w->node = reading_node_near(r, i);
            return 0;
        }
    }
    return 0;
}

static struct tly_rate reading_pcie(double speed)
{
    return (struct tly_rate){speed * TLY_PCIE_SHARE, speed > 0 ? TLY_FOUND : TLY_UNKNOWN};
}

static int reading_make_switch(struct topo_reading *r, int i, int *made)
{
    struct tly_machine *m = r->m;
    struct item *at = &r->item[i];
    struct way w;
    *made = at->place;
    if (at->place >= 0)
        return 0;
    int err = reading_follow(r, i, &w); /* as deep as the file is nested, 64 */
    if (err)
        return err;
    if (m->switches == TLY_MAX_SWITCHES)
        return reading_refuse(r, -E2BIG, "the machine has more than 128 PCIe switches", "");
    struct tly_switch *s = &m->sw[m->switches];
    *s = (struct tly_switch){.parent = w.parent, .node = w.node, .up = reading_pcie(w.speed)};
    memcpy(s->address, at->address, sizeof s->address);
    *made = at->place = m->switches++;
    return 0;
}

static int reading_take_gpu(struct topo_reading *r, int i)
{
    struct tly_machine *m = r->m;
    struct way w;
    int err = reading_follow(r, i, &w);
    if (err)
        return err;
    if (m->gpus == TLY_MAX_GPUS)
        return reading_refuse(r, -E2BIG, "the machine has more than 64 GPUs", "");
    struct tly_gpu *g = &m->gpu[m->gpus++];
    *g = (struct tly_gpu){.parent = w.parent, .node = w.node, .slice = -1, .link = reading_pcie(w.speed)};
    memcpy(g->address, r->item[i].address, sizeof g->address);
    memcpy(g->name, r->item[i].name, sizeof g->name);
    return 0;
}

static int reading_take_card(struct topo_reading *r, int i)
{
    struct tly_machine *m = r->m;
    struct item *at = &r->item[i];
    struct way w;
    if (at->first != i) {
        struct tly_card *c = &m->card[r->item[at->first].place];
        c->ports += at->ports;
        if (!c->name[0])
            memcpy(c->name, at->net, sizeof c->name);
        if (!c->rdma[0])
            memcpy(c->rdma, at->rdma, sizeof c->rdma);
        return 0;
    }
    int err = reading_follow(r, i, &w);
    if (err)
        return err;
    if (m->cards == TLY_MAX_CARDS)
        return reading_refuse(r, -E2BIG, "the machine has more than 64 network cards", "");
    struct tly_card *c = &m->card[at->place = m->cards++];
    *c = (struct tly_card){
        .parent = w.parent, .node = w.node, .ports = at->ports, .link = reading_pcie(w.speed)};
    memcpy(c->address, at->address, sizeof c->address);
    memcpy(c->name, at->net, sizeof c->name);
    memcpy(c->rdma, at->rdma, sizeof c->rdma);
    return 0;
}

static int reading_by_address(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Two objects at one address, as in a tree that closes to a ring. */
static int reading_refuse_doubles(struct topo_reading *r)
{
    const char **all = malloc((size_t)(r->items + 1) * sizeof *all);
    int n = 0, err = 0;
    if (!all)
        return reading_refuse(r, -ENOMEM, "out of memory", "");
    for (int i = 0; i < r->items; i++)
        if (r->item[i].address[0])
            all[n++] = r->item[i].address;
    qsort(all, (size_t)n, sizeof *all, reading_by_address);
    for (int i = 1; i < n && !err; i++)
        if (strcmp(all[i - 1], all[i]) == 0)
            err = reading_refuse(r, -EINVAL, "two devices have the PCI address ", all[i]);
    free(all);
    return err;
}

/* Domains of more than four digits come last. */
static int reading_by_bus(const void *a, const void *b)
{
    const struct tly_gpu *x = a, *y = b;
    size_t m = strlen(x->address), n = strlen(y->address);
    return m != n ? (m > n) - (m < n) : strcmp(x->address, y->address);
}

static int reading_build(struct topo_reading *r)
{
    int err = reading_refuse_doubles(r);
    if (!err)
        err = reading_take_nodes(r);
    if (err)
        return err;
    reading_find_functions(r);
    reading_count_below(r);
    for (int i = 0; i < r->items && !err; i++) {
        if (reading_is_gpu(&r->item[i]))
            err = reading_take_gpu(r, i);
        else if (reading_is_card(&r->item[i]))
            err = reading_take_card(r, i);
        r->m->nvswitches +=
            r->item[i].type == DEVICE && r->item[i].vendor == 0x10de && r->item[i].class == 0x0680;
    }
    /* GPUs get CUDA's numbers.  hwloc goes by NUMA nodes, which need not follow the bus. */
    qsort(r->m->gpu, (size_t)r->m->gpus, sizeof *r->m->gpu, reading_by_bus);
    return err;
}

int tly_machine_read(const char *xml, size_t length, tly_link_look *look, struct tly_machine *m, char *why,
                     size_t size)
{
    struct topo_reading r = {.look = look, .m = m, .why = why, .size = size};
    struct tly_xml x;
    enum tly_xml_event event;
    int err = 0;
    *m = (struct tly_machine){0};
    *why = '\0';
    if (length > MAX_BYTES)
        return reading_refuse(&r, -E2BIG, "the file is larger than 64 MB", "");
    tly_xml_init(&x, xml, length);
    while (!err && (event = tly_xml_next(&x)) != TLY_XML_END) {
        if (event == TLY_XML_OPEN)
            err = reading_read_element(&r, &x);
        else if (event == TLY_XML_CLOSE)
            r.bandwidth = r.bandwidth && x.depth > 1;
        else
            err = reading_refuse(&r, -EINVAL, x.wrong, "");
    }
    if (err && r.why[0]) { /* of the file still: say where */
        char what[200];
        snprintf(what, sizeof what, "%s", why);
        snprintf(why, size, "line %d: %s", x.line, what);
    }
    if (!err && !r.machine)
        err = reading_refuse(&r, -EINVAL, "the file has no machine in it", "");
    if (!err)
        err = reading_build(&r);
    free(r.item);
    return err;
}
