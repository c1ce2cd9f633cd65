/* detect.c - this machine: hwloc's view of it, sysfs for what links and cards could carry, NVML for the GPUs. */
#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <string.h>

#include "machine/machine.h"
#include "topo/card.h"

/* They start the drivers of GPUs, which takes seconds and memory, for what NVML says as well. */
static const char *const unwanted[] = {"cuda", "nvml", "opencl", "gl", "rsmi", "levelzero"};

static double detect_could_carry(const char *address)
{
    return tly_card_bus_rate_of("/sys/bus/pci/devices", address);
}

static void detect_ask_cards(struct tly_machine *m)
{
    for (int i = 0; i < m->cards; i++) {
        struct tly_card *c = &m->card[i];
        uint64_t rate = c->name[0] ? tly_card_rate_of("/sys/class/net", c->name) : 0;
        uint64_t rdma = c->rdma[0] ? tly_card_rdma_rate_of("/sys/class/infiniband", c->rdma) : 0;
        uint64_t ports = tly_card_device_rate_of("/sys/bus/pci/devices", c->address);
        if (rdma > rate)
            rate = rdma;
        if (ports > rate) /* the first port may have no cable */
            rate = ports;
        if (rate)
            c->rate = (struct tly_rate){(double)rate / 8, TLY_FOUND};
    }
}

/* GPUs that hwloc did not see: the kernel may say where they are. */
static void detect_ask_nodes(struct tly_machine *m)
{
    for (int i = 0; i < m->gpus; i++) {
        char path[96];
        int number = -1;
        snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", m->gpu[i].address);
        FILE *f = m->gpu[i].node < 0 ? fopen(path, "re") : NULL;
        if (f && fscanf(f, "%d", &number) == 1)
            for (int n = 0; n < m->nodes; n++)
                if (m->node[n].number == number)
                    m->gpu[i].node = n;
        if (f)
            fclose(f);
    }
}

int tly_machine_detect(struct tly_machine *m, char *why, size_t size)
{
    hwloc_topology_t t;
    char *xml = NULL;
    int length = 0, err = -EIO;
    if (hwloc_topology_init(&t) != 0) {
        snprintf(why, size, "hwloc does not start");
        return -EIO;
    }
    for (size_t i = 0; i < sizeof unwanted / sizeof *unwanted; i++)
        hwloc_topology_set_components(t, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, unwanted[i]);
    hwloc_topology_set_io_types_filter(t, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (hwloc_topology_load(t) != 0 || hwloc_topology_export_xmlbuffer(t, &xml, &length, 0) != 0)
        snprintf(why, size, "hwloc cannot read this machine");
    else /* the length counts the NUL at the end */
        err = tly_machine_read(xml, strnlen(xml, (size_t)length), detect_could_carry, m, why, size);
    if (xml)
        hwloc_free_xmlbuffer(t, xml);
    hwloc_topology_destroy(t);
    if (err)
        return err;
    tly_machine_nvml(m, "libnvidia-ml.so.1");
    detect_ask_nodes(m);
    detect_ask_cards(m);
    return 0;
}
