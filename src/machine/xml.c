/* xml.c - see xml.h. */
#include "machine/xml.h"

#include <stdlib.h>
#include <string.h>

void tly_xml_init(struct tly_xml *x, const char *text, size_t length)
{
    *x = (struct tly_xml){.at = text, .end = text + length, .line = 1};
}

static enum tly_xml_event xml_wrong(struct tly_xml *x, const char *what)
{
    x->wrong = what;
    return TLY_XML_WRONG;
}

static bool xml_starts(const struct tly_xml *x, const char *with)
{
    size_t length = strlen(with);
    return (size_t)(x->end - x->at) >= length && memcmp(x->at, with, length) == 0;
}

/* Moves to a place further on and counts the lines between. */
static void xml_go(struct tly_xml *x, const char *to)
{
    for (; x->at < to; x->at++)
        x->line += *x->at == '\n';
}

/* Moves behind the next `what`. */
static bool xml_skip_to(struct tly_xml *x, const char *what)
{
    const char *found = memmem(x->at, (size_t)(x->end - x->at), what, strlen(what));
    if (!found)
        return false;
    xml_go(x, found + strlen(what));
    return true;
}

static bool xml_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static void xml_skip_blanks(struct tly_xml *x)
{
    const char *to = x->at;
    while (to < x->end && xml_blank(*to))
        to++;
    xml_go(x, to);
}

/* A name: everything up to a blank or a character of the markup. */
static struct tly_xml_text xml_read_name(struct tly_xml *x)
{
    struct tly_xml_text t = {.at = x->at};
    while (x->at < x->end && !xml_blank(*x->at) && !strchr("<>=/\"'", *x->at)) /* finds NUL as well */
        x->at++;
    t.length = (size_t)(x->at - t.at);
    return t;
}

static bool xml_same(struct tly_xml_text a, struct tly_xml_text b)
{
    return a.length == b.length && memcmp(a.at, b.at, a.length) == 0;
}

/* NAME="VALUE"; NULL, or what is wrong with it. */
static const char *xml_read_attribute(struct tly_xml *x)
{
    if (x->attributes == TLY_XML_ATTRIBUTES)
        return "an element has more than 48 attributes";
    struct tly_xml_text name = xml_read_name(x), value;
    if (!name.length)
        return "a tag is not well-formed";
    for (int i = 0; i < x->attributes; i++)
        if (xml_same(x->name[i], name))
            return "an element has the same attribute twice";
    xml_skip_blanks(x);
    if (x->at == x->end || *x->at != '=')
        return "an attribute has no value";
    x->at++;
    xml_skip_blanks(x);
    if (x->at == x->end || (*x->at != '"' && *x->at != '\''))
        return "an attribute's value is not in quotes";
    char quote = *x->at++;
    value.at = x->at;
    const char *end = memchr(x->at, quote, (size_t)(x->end - x->at));
    if (!end)
        return "the file ends within a tag";
    value.length = (size_t)(end - value.at);
    if (memchr(value.at, '<', value.length))
        return "an attribute's value holds a \"<\"";
    xml_go(x, end + 1);
    x->name[x->attributes] = name;
    x->value[x->attributes++] = value;
    return NULL;
}

/* Behind the "<" of an opening tag. */
static enum tly_xml_event xml_open_element(struct tly_xml *x)
{
    struct tly_xml_text name = xml_read_name(x);
    if (!name.length)
        return xml_wrong(x, "a tag is not well-formed");
    if (x->depth == TLY_XML_DEPTH)
        return xml_wrong(x, "elements are nested more than 64 deep");
    x->attributes = 0;
    for (;;) {
        xml_skip_blanks(x);
        if (x->at == x->end)
            return xml_wrong(x, "the file ends within a tag");
        if (xml_starts(x, "/>") || *x->at == '>')
            break;
        const char *what = xml_read_attribute(x);
        if (what)
            return xml_wrong(x, what);
    }
    x->empty = *x->at == '/';
    x->at += 1 + x->empty;
    x->open[x->depth++] = name;
    return TLY_XML_OPEN;
}

/* Behind the "</" of a closing tag. */
static enum tly_xml_event xml_close_element(struct tly_xml *x)
{
    struct tly_xml_text name = xml_read_name(x);
    xml_skip_blanks(x);
    if (x->at == x->end)
        return xml_wrong(x, "the file ends within a tag");
    if (*x->at != '>')
        return xml_wrong(x, "a tag is not well-formed");
    if (!x->depth || !xml_same(x->open[x->depth - 1], name))
        return xml_wrong(x, "a tag closes an element that is not open there");
    x->at++;
    x->depth--;
    x->attributes = 0;
    return TLY_XML_CLOSE;
}

enum tly_xml_event tly_xml_next(struct tly_xml *x)
{
    if (x->wrong)
        return TLY_XML_WRONG;
    if (x->empty) {
        x->empty = false;
        x->depth--;
        x->attributes = 0;
        return TLY_XML_CLOSE;
    }
    for (;;) {
        const char *next = memchr(x->at, '<', (size_t)(x->end - x->at));
        xml_go(x, next ? next : x->end);
        if (!next)
            return x->depth ? xml_wrong(x, "the file ends before all its elements do") : TLY_XML_END;
        if (xml_starts(x, "<?")) {
            if (!xml_skip_to(x, "?>"))
                return xml_wrong(x, "the file ends within a tag");
        } else if (xml_starts(x, "<!--")) {
            if (!xml_skip_to(x, "-->"))
                return xml_wrong(x, "the file ends within a comment");
        } else if (xml_starts(x, "<!")) {
            const char *from = x->at;
            if (!xml_starts(x, "<!DOCTYPE") || x->depth || !xml_skip_to(x, ">"))
                return xml_wrong(x, "a declaration is not well-formed");
            if (memchr(from, '[', (size_t)(x->at - from)))
                return xml_wrong(x, "the document type has declarations of its own, which are not read");
        } else if (xml_starts(x, "</")) {
            x->at += 2;
            return xml_close_element(x);
        } else {
            x->at++;
            return xml_open_element(x);
        }
    }
}

bool tly_xml_is(const struct tly_xml *x, const char *element)
{
    struct tly_xml_text name = {element, strlen(element)};
    return x->depth && xml_same(x->open[x->depth - 1], name);
}

/* One character of a value, of which "&quot;" is one as well; moves *at behind it. */
static char xml_decode(const char **at, const char *end)
{
    static const struct {
        const char *name;
        char c;
    } entities[] = {{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}};
    const char *p = *at;
    if (*p == '&') {
        for (size_t i = 0; i < sizeof entities / sizeof *entities; i++) {
            size_t length = strlen(entities[i].name);
            if ((size_t)(end - p) >= length && memcmp(p, entities[i].name, length) == 0) {
                *at = p + length;
                return entities[i].c;
            }
        }
        const char *stop = memchr(p, ';', (size_t)(end - p) < 12 ? (size_t)(end - p) : 12);
        *at = stop && stop - p > 1 && p[1] == '#' ? stop + 1 : p + 1;
        return stop && p[1] == '#' ? '?' : '&';
    }
    *at = p + 1;
    return *p;
}

bool tly_xml_get(const struct tly_xml *x, const char *attribute, char *value, size_t size)
{
    struct tly_xml_text name = {attribute, strlen(attribute)};
    size_t n = 0;
    int i = 0;
    value[0] = '\0';
    while (i < x->attributes && !xml_same(x->name[i], name))
        i++;
    if (i == x->attributes)
        return false;
    const char *at = x->value[i].at, *end = at + x->value[i].length;
    while (at < end && n + 1 < size) {
        char c = xml_decode(&at, end);
        value[n++] = c >= ' ' && c <= '~' ? c : '?';
    }
    value[n] = '\0';
    return true;
}
