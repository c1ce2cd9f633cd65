/* topo.h - what `tally topo` says: the machine, the plan, and the words for both.  topo.c reads and prints JSON,
 * topo_text.c writes for people, topo_svg.c draws. */
#ifndef TLY_CLI_TOPO_H
#define TLY_CLI_TOPO_H

#include <stdio.h>

#include "inside/flow.h"
#include "inside/inside.h"
#include "machine/machine.h"

struct tly_cli_topo {
    struct tly_machine m;
    struct tly_inside plan, direct; /* among all ways; among those with direct copies alone */
    struct tly_flow_job flow_job;   /* piece is 0: not asked for */
    struct tly_flow flow;
    struct tly_inside_move better[2];
    int betters, workers, servers;
};

/* The machine of hwloc's XML in `xml`, or this one if NULL, with the list of `links` (may be NULL), made whole.  An exit
 * status, with the sentence printed in the name of the command. */
int tly_cli_machine(const char *command, const char *xml, const char *links, struct tly_machine *m);

/* Says why tly_inside_plan() has no plan for the machine of file `xml` (NULL: this one).  An exit status. */
int tly_cli_no_plan(const char *command, const char *xml, int err);

void tly_cli_topo_print(const struct tly_cli_topo *t);
int tly_cli_topo_draw(FILE *out, const struct tly_cli_topo *t); /* -ENOMEM */

/* Words.  Each writes to `text` and returns it. */
enum { TLY_CLI_WORDS = 256 };
const char *tly_cli_way_text(const struct tly_machine *m, const struct tly_inside_way *way,
                             char text[TLY_CLI_WORDS]);
const char *tly_cli_option_text(enum tly_inside_base base, enum tly_inside_shares shares,
                                char text[TLY_CLI_WORDS]);
const char *tly_cli_link_text(const struct tly_machine *m, const struct tly_inside_link *l,
                              char text[TLY_CLI_WORDS]);
const char *tly_cli_move_text(const struct tly_machine *m, const struct tly_inside_move *move,
                              char text[TLY_CLI_WORDS]);
const char *tly_cli_rule_text(const struct tly_inside *plan, char text[TLY_CLI_WORDS]);
const char *tly_cli_copied_text(const struct tly_inside *plan, char text[TLY_CLI_WORDS]);
const char *tly_cli_card_text(const struct tly_card *c, char text[TLY_CLI_WORDS]);

/* "1, 3 to 5" of the GPUs whose bit is set. */
const char *tly_cli_list_text(uint64_t set, char text[TLY_CLI_WORDS]);

#endif
