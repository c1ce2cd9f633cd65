/* endpoint.c - lists of endpoints: their bytes, and the addresses in them. */
#include "transport/endpoint.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "transport/address.h"

/* Printable, and with a scheme of lower-case letters and digits. */
static bool endpoint_is_well_formed(const char *text)
{
    size_t scheme = strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789");
    if (!scheme || text[scheme] != ':' || !text[scheme + 1])
        return false;
    for (const char *p = text; *p; p++)
        if (*p <= ' ' || *p > '~')
            return false;
    return true;
}

void tly_endpoints_write(struct tly_writer *w, const struct tly_endpoints *e)
{
    tly_write32(w, e->count);
    for (uint32_t i = 0; i < e->count; i++)
        tly_write_text(w, e->at[i].text);
}

int tly_endpoints_read(struct tly_reader *r, struct tly_endpoints *e)
{
    struct tly_endpoints x = {.count = tly_read32(r)};
    if (r->failed || x.count > TLY_MOST_ENDPOINTS)
        return -EPROTO;
    for (uint32_t i = 0; i < x.count; i++) {
        tly_read_text(r, x.at[i].text, sizeof x.at[i].text);
        if (r->failed || !endpoint_is_well_formed(x.at[i].text))
            return -EPROTO;
    }
    *e = x;
    return 0;
}

int tly_endpoints_add(struct tly_endpoints *e, const char *scheme, const char *where)
{
    struct tly_endpoint x = {0};
    if (e->count == TLY_MOST_ENDPOINTS ||
        (size_t)snprintf(x.text, sizeof x.text, "%s:%s", scheme, where) >= sizeof x.text)
        return -ENOSPC;
    e->at[e->count++] = x;
    return 0;
}

const char *tly_endpoints_where(const struct tly_endpoints *e, const char *scheme)
{
    size_t len = strlen(scheme);
    for (uint32_t i = 0; i < e->count; i++)
        if (strncmp(e->at[i].text, scheme, len) == 0 && e->at[i].text[len] == ':')
            return e->at[i].text + len + 1;
    return NULL;
}

/* False: this one has no address. */
static bool endpoint_address_of(const struct tly_endpoint *e, struct sockaddr_storage *out)
{
    const char *where = strchr(e->text, ':');
    return where && tly_address_read(where + 1, out) == 0;
}

bool tly_endpoints_address(const struct tly_endpoints *e, struct sockaddr_storage *out)
{
    for (uint32_t i = 0; i < e->count; i++)
        if (endpoint_address_of(&e->at[i], out))
            return true;
    return false;
}

void tly_endpoints_place(struct tly_endpoints *e, const struct sockaddr_storage *host)
{
    for (uint32_t i = 0; i < e->count; i++) {
        struct sockaddr_storage a, placed = *host;
        if (!endpoint_address_of(&e->at[i], &a))
            continue;
        char text[80];
        char *where = strchr(e->at[i].text, ':') + 1;
        tly_address_set_port(&placed, tly_address_port(&a));
        tly_address_text(&placed, text, sizeof text);
        snprintf(where, (size_t)(e->at[i].text + sizeof e->at[i].text - where), "%s", text);
    }
}

uint32_t tly_endpoints_host(const struct tly_endpoints *e, char out[TLY_HOST_TEXT])
{
    struct sockaddr_storage a;
    out[0] = '\0';
    if (!tly_endpoints_address(e, &a))
        return 0;
    tly_address_host(&a, out, TLY_HOST_TEXT);
    return tly_address_port(&a);
}
