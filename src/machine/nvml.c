/* nvml.c - what NVIDIA's management library says of GPUs: names, memory, slices (MIG), NVLinks, copies between them.
 *
 * The library comes with the driver and is opened at run time, so building needs nothing of NVIDIA's; what is declared here
 * is the little of nvml.h that is called, whose layout its makers keep.  Any call may fail, in containers and with drivers
 * of all ages: what was learnt till then stays, and a note says what is missing. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "machine/machine.h"

enum {
    NOT_SUPPORTED = 3,
    SPEED_MBYTES = 90, /* field: of one NVLink of this GPU each way */
    REMOTE_GPU = 0,
    REMOTE_SWITCH = 2,
    READ_PEERS = 0,
    MOST_LINKS = 18,
    MOST_SLICES = 8,
};

/* What a link carries if the library does not say: NVLink 2 to 4. */
#define LINK_GUESS 25e9

typedef void *device;

struct pci_info {
    char short_address[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char address[32];
};

struct memory_info {
    unsigned long long total, free, used;
};

struct field_value {
    unsigned field, scope;
    long long time, latency;
    int type, result;
    union {
        double number;
        unsigned small;
        unsigned long long large;
    } value;
};

struct nvml {
    void *library;
    int (*start)(void);
    int (*stop)(void);
    const char *(*text)(int);
    int (*count)(unsigned *);
    int (*open)(unsigned, device *);
    int (*pci)(device, struct pci_info *);
    int (*name)(device, char *, unsigned);
    int (*memory)(device, struct memory_info *);
    int (*mig_mode)(device, unsigned *, unsigned *);
    int (*slice)(device, unsigned, device *);
    int (*link_state)(device, unsigned, unsigned *);
    int (*link_remote)(device, unsigned, struct pci_info *);
    int (*link_remote_type)(device, unsigned, int *);
    int (*fields)(device, int, struct field_value *);
    int (*peers)(device, device, int, int *);
    unsigned devices;
    device device[TLY_MAX_GPUS];
    int gpu[TLY_MAX_GPUS]; /* each device's in the machine */
};

/* dlsym gives a pointer to an object, POSIX lets it be one to a function. */
static void nvml_find(struct nvml *n, const char *name, void *function)
{
    void *found = dlsym(n->library, name);
    memcpy(function, &found, sizeof found);
}

static bool nvml_load(struct nvml *n, const char *library)
{
    n->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!n->library)
        return false;
    nvml_find(n, "nvmlInit_v2", &n->start);
    nvml_find(n, "nvmlShutdown", &n->stop);
    nvml_find(n, "nvmlErrorString", &n->text);
    nvml_find(n, "nvmlDeviceGetCount_v2", &n->count);
    nvml_find(n, "nvmlDeviceGetHandleByIndex_v2", &n->open);
    nvml_find(n, "nvmlDeviceGetPciInfo_v3", &n->pci);
    nvml_find(n, "nvmlDeviceGetName", &n->name);
    nvml_find(n, "nvmlDeviceGetMemoryInfo", &n->memory);
    nvml_find(n, "nvmlDeviceGetMigMode", &n->mig_mode);
    nvml_find(n, "nvmlDeviceGetMigDeviceHandleByIndex", &n->slice);
    nvml_find(n, "nvmlDeviceGetNvLinkState", &n->link_state);
    nvml_find(n, "nvmlDeviceGetNvLinkRemotePciInfo_v2", &n->link_remote);
    nvml_find(n, "nvmlDeviceGetNvLinkRemoteDeviceType", &n->link_remote_type);
    nvml_find(n, "nvmlDeviceGetFieldValues", &n->fields);
    nvml_find(n, "nvmlDeviceGetP2PStatus", &n->peers);
    return true;
}

static const char *nvml_sentence(const struct nvml *n, int err)
{
    const char *text = n->text ? n->text(err) : NULL;
    return text ? text : "no reason given";
}

static void nvml_address_of(const struct pci_info *p, char address[24])
{
    snprintf(address, 24, "%04x:%02x:%02x.0", p->domain, p->bus & 0xff, p->device & 0x1f);
}

/* Text from outside, for terminals and files. */
static void nvml_copy_text(char *to, size_t size, const char *from)
{
    size_t n = 0;
    for (; n + 1 < size && from[n]; n++)
        to[n] = from[n] >= ' ' && from[n] <= '~' ? from[n] : '?';
    to[n] = '\0';
}

/* The GPU in the machine; one that the bus does not show, as in some containers, is added.  -1: there is no room. */
static int nvml_place(struct tly_machine *m, const struct pci_info *p)
{
    char address[24];
    nvml_address_of(p, address);
    int g = tly_machine_gpu(m, address);
    if (g >= 0 || m->gpus == TLY_MAX_GPUS)
        return g;
    tly_machine_note(m, "GPU %s is not visible on the bus: a link of its own is guessed", address);
    m->gpu[m->gpus] = (struct tly_gpu){.parent = -1, .node = -1, .slice = -1};
    memcpy(m->gpu[m->gpus].address, address, sizeof address);
    return m->gpus++;
}

static int nvml_take_device(struct nvml *n, struct tly_machine *m, unsigned i)
{
    struct pci_info pci = {0};
    struct memory_info memory = {0};
    char name[96] = "";
    unsigned mode = 0, pending = 0, slices = 0;
    int err = n->open(i, &n->device[i]);
    if (!err)
        err = n->pci(n->device[i], &pci);
    if (err)
        return err;
    int g = n->gpu[i] = nvml_place(m, &pci);
    if (g < 0)
        return 0;
    if (n->name && n->name(n->device[i], name, sizeof name) == 0)
        nvml_copy_text(m->gpu[g].name, sizeof m->gpu[g].name, name);
    if (n->memory && n->memory(n->device[i], &memory) == 0)
        m->gpu[g].memory = memory.total;
    if (!n->mig_mode || !n->slice || n->mig_mode(n->device[i], &mode, &pending) != 0 || mode != 1)
        return 0;
    for (unsigned s = 0; s < MOST_SLICES; s++) {
        device slice;
        slices += n->slice(n->device[i], s, &slice) == 0;
    }
    m->gpu[g].slices = (int)slices;
    if (!slices)
        tly_machine_note(m, "GPU %s is set to be cut into slices (MIG) but has none", m->gpu[g].address);
    return 0;
}

static double nvml_link_rate(const struct nvml *n, unsigned i, bool *guessed)
{
    struct field_value f = {.field = SPEED_MBYTES};
    bool known = n->fields && n->fields(n->device[i], 1, &f) == 0 && f.result == 0 && f.value.small > 0 &&
                 f.value.small < 1000000;
    *guessed |= !known;
    return known ? f.value.small * 1e6 : LINK_GUESS;
}

/* One link of one GPU. */
static int nvml_take_link(struct nvml *n, struct tly_machine *m, unsigned i, unsigned link, double rate)
{
    struct pci_info remote = {0};
    char address[24];
    int type = -1, g = n->gpu[i], err;
    if (n->link_remote_type && n->link_remote_type(n->device[i], link, &type) != 0)
        type = -1;
    if (type == REMOTE_SWITCH) {
        m->gpu[g].nvswitch.bytes += rate;
        m->gpu[g].nvswitch.source = TLY_FOUND;
        return 0;
    }
    err = n->link_remote ? n->link_remote(n->device[i], link, &remote) : NOT_SUPPORTED;
    if (err)
        return err;
    nvml_address_of(&remote, address);
    int other = tly_machine_gpu(m, address);
    if (other >= 0 && other != g)
        m->nvlink[g][other] += rate;
    else if (other < 0 && type < 0 && m->nvswitches) { /* of an old driver: it can only be a switch */
        m->gpu[g].nvswitch.bytes += rate;
        m->gpu[g].nvswitch.source = TLY_FOUND;
    }
    return 0;
}

static int nvml_take_links(struct nvml *n, struct tly_machine *m, unsigned i, bool *guessed)
{
    double rate = 0;
    for (unsigned link = 0; n->link_state && link < MOST_LINKS; link++) {
        unsigned active = 0;
        int err = n->link_state(n->device[i], link, &active);
        if (err == NOT_SUPPORTED || err == 2) /* a GPU without, or one with fewer */
            return 0;
        if (!err && active) {
            if (rate <= 0)
                rate = nvml_link_rate(n, i, guessed);
            err = nvml_take_link(n, m, i, link, rate);
        }
        if (err)
            return err;
    }
    return 0;
}

/* A link that only one end has told of carries both ways. */
static void nvml_both_ways(struct tly_machine *m)
{
    for (int a = 0; a < m->gpus; a++)
        for (int b = 0; b < a; b++) {
            double most = m->nvlink[a][b] > m->nvlink[b][a] ? m->nvlink[a][b] : m->nvlink[b][a];
            m->nvlink[a][b] = m->nvlink[b][a] = most;
            if (most > 0)
                m->nvlink_source = TLY_FOUND;
        }
}

/* Cards for desks do not copy to one another, nor do GPUs that a virtual machine was given. */
static void nvml_take_peers(struct nvml *n, struct tly_machine *m)
{
    for (unsigned i = 0; n->peers && i < n->devices && !m->peers_off; i++)
        for (unsigned j = 0; j < i; j++) {
            int a = n->gpu[i], b = n->gpu[j], status = 0;
            if (a < 0 || b < 0 || m->gpu[a].parent < 0 || m->gpu[a].parent != m->gpu[b].parent)
                continue;
            if (n->peers(n->device[i], n->device[j], READ_PEERS, &status) != 0 || status == 0)
                continue;
            m->peers_off = true;
            tly_machine_note(m, "GPUs %d and %d cannot copy to one another over their PCIe switch", b, a);
            break;
        }
}

static void nvml_ask(struct nvml *n, struct tly_machine *m)
{
    bool guessed = false;
    int err = n->count(&n->devices);
    if (err) {
        tly_machine_note(m, "NVML does not say how many GPUs there are: %s", nvml_sentence(n, err));
        return;
    }
    if (n->devices > TLY_MAX_GPUS) {
        tly_machine_note(m, "NVML has %u GPUs: those behind the 64th are left out", n->devices);
        n->devices = TLY_MAX_GPUS;
    }
    for (unsigned i = 0; i < n->devices; i++) {
        err = nvml_take_device(n, m, i);
        if (err) {
            tly_machine_note(
                m, "NVML fails at GPU %u: %s; what it has to say of this and further ones is missing", i,
                nvml_sentence(n, err));
            n->devices = i;
        }
    }
    for (unsigned i = 0; i < n->devices; i++) {
        err = n->gpu[i] >= 0 ? nvml_take_links(n, m, i, &guessed) : 0;
        if (err)
            tly_machine_note(m, "NVML fails at the NVLinks of GPU %u: %s; some of them are missing", i,
                             nvml_sentence(n, err));
    }
    if (guessed)
        tly_machine_note(m, "NVML does not say what an NVLink carries: %.0f Gbit/s is guessed",
                         LINK_GUESS * 8e-9);
    nvml_both_ways(m);
    nvml_take_peers(n, m);
}

void tly_machine_nvml(struct tly_machine *m, const char *library)
{
    struct nvml n = {0};
    if (!nvml_load(&n, library)) {
        if (m->gpus)
            tly_machine_note(m, "there is no %s: NVLinks and slices of GPUs are not known", library);
        return;
    }
    if (!n.start || !n.stop || !n.count || !n.open || !n.pci)
        tly_machine_note(m, "%s is not NVIDIA's, or too old: NVLinks and slices of GPUs are not known",
                         library);
    else {
        int err = n.start();
        if (err)
            tly_machine_note(m, "NVML does not start: %s; NVLinks and slices of GPUs are not known",
                             nvml_sentence(&n, err));
        else {
            nvml_ask(&n, m);
            n.stop();
        }
    }
    dlclose(n.library);
}
