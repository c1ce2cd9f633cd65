/* fake_nvml.c - stands in for NVIDIA's management library: GPUs, NVLinks, slices and failures as FAKE_NVML says.
 *
 * FAKE_NVML is a list of words:
 *   gpu=ADDRESS            one more GPU
 *   link=A:B:N             N NVLinks between two GPUs, by number
 *   switch=A:N             N NVLinks of a GPU into NVSwitches
 *   mig=A:N                a GPU cut into N slices
 *   speed=MBYTES           what a link carries
 *   fail=CALL[:GPU]        this call fails (start, count, pci, state, remote), of this GPU or of all
 *   nopeers, odd           copies over PCIe are not possible; names have odd characters */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64, LINKS = 18 };

struct gpu {
    char address[32];
    int slices, links, remote[LINKS]; /* -1: a switch */
};

struct pci_info {
    char short_address[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char address[32];
};

struct field_value {
    unsigned field, scope;
    long long time, latency;
    int type, result;
    unsigned long long value;
};

static struct gpu gpus[MOST];
static int count;
static unsigned speed;
static bool no_peers, odd;
static char failing[64];

#define EXPORT __attribute__((visibility("default")))

static void link_to(int a, int b, int n)
{
    while (n-- > 0 && a >= 0 && a < MOST && gpus[a].links < LINKS)
        gpus[a].remote[gpus[a].links++] = b;
}

static bool fails(const char *call, int gpu)
{
    char one[64];
    snprintf(one, sizeof one, "%s:%d", call, gpu);
    return strcmp(failing, call) == 0 || strcmp(failing, one) == 0;
}

static void take(const char *word)
{
    int a = 0, b = 0, n = 0;
    if (sscanf(word, "gpu=%31s", gpus[count < MOST ? count : 0].address) == 1)
        count++;
    else if (sscanf(word, "link=%d:%d:%d", &a, &b, &n) == 3) {
        link_to(a, b, n);
        link_to(b, a, n);
    } else if (sscanf(word, "switch=%d:%d", &a, &n) == 2)
        link_to(a, -1, n);
    else if (sscanf(word, "mig=%d:%d", &a, &n) == 2)
        gpus[a].slices = n;
    else if (sscanf(word, "speed=%u", &speed) != 1 && sscanf(word, "fail=%63s", failing) != 1) {
        no_peers |= strcmp(word, "nopeers") == 0;
        odd |= strcmp(word, "odd") == 0;
    }
}

EXPORT int nvmlInit_v2(void)
{
    const char *list = getenv("FAKE_NVML");
    char *copy = strdup(list ? list : ""), *save = NULL;
    memset(gpus, 0, sizeof gpus);
    count = 0;
    speed = 0;
    no_peers = odd = false;
    failing[0] = '\0';
    for (char *w = copy ? strtok_r(copy, " ", &save) : NULL; w; w = strtok_r(NULL, " ", &save))
        take(w);
    free(copy);
    return fails("start", 0) ? 9 : 0;
}

EXPORT int nvmlShutdown(void)
{
    return 0;
}

EXPORT const char *nvmlErrorString(int err)
{
    return err == 15 ? "GPU is lost" : err == 9 ? "Driver Not Loaded" : NULL;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *n)
{
    *n = (unsigned)count;
    return fails("count", 0) ? 15 : 0;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **device)
{
    *device = &gpus[i];
    return i < (unsigned)count && i < MOST ? 0 : 2;
}

static int number(const void *device)
{
    return (int)((const struct gpu *)device - gpus);
}

static void address(int gpu, struct pci_info *p)
{
    memset(p, 0, sizeof *p);
    sscanf(gpus[gpu].address, "%x:%x:%x", &p->domain, &p->bus, &p->device);
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *p)
{
    address(number(device), p);
    return fails("pci", number(device)) ? 15 : 0;
}

EXPORT int nvmlDeviceGetName(void *device, char *name, unsigned size)
{
    snprintf(name, size,
             odd ? "GPU\033[31m \"<&>\" of a name that goes on and on, and on and on and on" : "Fake GPU");
    return 0;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{
    memory[0] = 80ULL << 30;
    return 0;
}

EXPORT int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    *current = *pending = gpus[number(device)].slices != 0;
    return 0;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned i, void **slice)
{
    *slice = device;
    return (int)i < gpus[number(device)].slices ? 0 : 6;
}

EXPORT int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active)
{
    const struct gpu *g = device;
    *active = 1;
    return fails("state", number(device)) ? 15 : (int)link < g->links ? 0 : g->links ? 2 : 3;
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type)
{
    *type = ((const struct gpu *)device)->remote[link] < 0 ? 2 : 0;
    return 0;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, struct pci_info *p)
{
    int remote = ((const struct gpu *)device)->remote[link];
    address(remote < 0 ? 0 : remote, p);
    return fails("remote", number(device)) ? 15 : 0;
}

EXPORT int nvmlDeviceGetFieldValues(void *device, int n, struct field_value *f)
{
    f->result = speed ? 0 : 3;
    f->value = speed;
    return f->field == 90 ? 0 : 2;
}

EXPORT int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status)
{
    *status = no_peers ? 3 : 0;
    return 0;
}
