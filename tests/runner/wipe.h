/* Removes a test's directory. */
#ifndef UCM_TESTS_WIPE_H
#define UCM_TESTS_WIPE_H

/* With all that is in it; follows no links. 0, or -1 where something stays, with errno. */
int wipe(const char *directory);

#endif
