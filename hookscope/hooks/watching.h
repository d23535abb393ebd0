#include "interpreter.h"

/* Of what `GradientWatch.parts` returns: the watch, and `GradientWatch.outputs`. */
enum { WATCH_SELF, WATCH_OUTPUTS };

/* Put a hook on a call's output, at a version, that is none of its inputs; return 1 if it has one, 0 if that is left to
 * Python, -1 on an error. */
HIDDEN int watch_output(Owned *owned, Object *parts, Object *made, Object *output, i64 version);
