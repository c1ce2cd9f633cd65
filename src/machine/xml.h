/* xml.h - a reader for the XML that hwloc writes: elements and attributes, nothing else of XML.
 *
 * It reads from one block of memory, allocates nothing, and is bounded in depth and in attributes.  Text between tags,
 * comments and processing instructions are skipped; a document type with declarations of its own is refused, so there are
 * no entities but the five of XML and character numbers.  Files come from strangers: any bytes end in an element or in a
 * sentence. */
#ifndef TLY_XML_H
#define TLY_XML_H

#include <stdbool.h>
#include <stddef.h>

enum { TLY_XML_DEPTH = 64, TLY_XML_ATTRIBUTES = 48 };

struct tly_xml_text {
    const char *at;
    size_t length;
};

struct tly_xml {
    const char *at, *end;
    int line;                                /* of `at`, from 1 */
    int depth;                               /* open elements */
    struct tly_xml_text open[TLY_XML_DEPTH]; /* their names */
    bool empty;                              /* the element read last has no content: its end comes next */
    int attributes;
    struct tly_xml_text name[TLY_XML_ATTRIBUTES], value[TLY_XML_ATTRIBUTES]; /* as written */
    const char *wrong;                                                       /* what the error is */
};

enum tly_xml_event { TLY_XML_OPEN, TLY_XML_CLOSE, TLY_XML_END, TLY_XML_WRONG };

void tly_xml_init(struct tly_xml *x, const char *text, size_t length);

/* The next begin or end of an element.  At OPEN, tly_xml_is() and tly_xml_get() say what it is.  At WRONG, `wrong` and
 * `line` do, and the reader stays there. */
enum tly_xml_event tly_xml_next(struct tly_xml *x);

/* Is the innermost open element of this name? */
bool tly_xml_is(const struct tly_xml *x, const char *element);

/* The value of an attribute of the element just opened, with what is not printable ASCII as '?', cut to fit; false and ""
 * if it has no such attribute. */
bool tly_xml_get(const struct tly_xml *x, const char *attribute, char *value, size_t size);

#endif
