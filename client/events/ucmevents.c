#include "client/events/events.h"

int main(int argc, char **argv)
{
    return program_main(&events_program, argc, argv, NULL);
}
