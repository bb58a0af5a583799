/* The configuration file of UCM (ucm_config.yaml) as one of ucmd: what both have in common. Needs no daemon.
 * Threads: one. */
#ifndef UCM_CTL_IMPORT_H
#define UCM_CTL_IMPORT_H

/* Prints ucmd's YAML on standard output: the keys that have a counterpart, and a comment for each line that has
 * none. Returns an exit status. A file that can't be read, or that is no
 * configuration, gets a sentence on standard error. */
int import_print(const char *path);

#endif
