/* `GradientWatch.outputs` and `GradientWatch._arrive` of gradient_hooks.py for the usual output: a plain tensor that
 * autograd tracks, that is no view and whose module needs no copies. Any other is left to Python. Why it is compiled: see
 * calls.c.
 */

#include "watching.h"

/* What `self` holds, in the order of `GradientWatch.parts`, then of `_ALIKE` in gradient_hooks.py. DEFINITION is the
 * address of that of `arrive`. */
enum {
    WATCH = WATCH_SELF, OUTPUTS = WATCH_OUTPUTS, DEFINITION, ARRIVE, OBSERVE, ACQUIRE, RELEASE, BYPASS,
    TENSOR, SITE, DICT,
    IS_TRANSFORMED, HAS_GRADIENTS, IS_CASTING,
    REQUIRES_GRAD, IS_LEAF, IS_VIEW, HOOKS, NODE, REGISTER, SHAPE, DTYPE,
    OF_SITES, CLONE_AT, HOPELESS, LATEST, ATTACHED, LISTENING, PARTS, ARRIVALS, PLACE, VALUE, ENTER, EXIT,
    NONE, TRUE, FALSE, EMPTY, ROLE
};

/* What `arrive` is bound to: the parts, and the sites. */
enum { ITS_PARTS, SITES };

/* The items of `ModuleCall` that are used here. */
enum { LAYER, MODULE, NUMBER };

/* The fields of `GradientSite`, and of `GradientWatch._latest`. */
enum { SITE_FIELDS = 8 };
enum { LATEST_REFERENCE, LATEST_VERSION, LATEST_COUNT, LATEST_SITES, LATEST_ITEMS };

/* Tell whether a container that an attribute holds is empty. */
static int is_empty(Object *object, Object *name) {
    Object *container = py->attribute(object, name);
    i64 size = container ? py->size(container) : -1;
    if (size < 0) py->clear();
    py->drop(container);
    return size == 0;
}

/* Tell whether a function, given an object, returns another one. */
static int returns(Object *function, Object *given, Object *other) {
    return is(py->call(function, &given, 1, 0), other);
}

/* Tell whether the hook of the tensor that came last is the newest one of this tensor, which is the same. */
static int has_hook(Parts self, Object *latest, Object *tensor, i64 version, i64 hook_count) {
    return latest != self[NONE] && py->value(py->item(latest, LATEST_VERSION)) == version &&
           py->value(py->item(latest, LATEST_COUNT)) == hook_count &&
           is(py->call(py->item(latest, LATEST_REFERENCE), 0, 0, 0), tensor);
}

/* As `GradientWatch._hook`: return the tensor's hooks, with a new one for a list of sites. */
static Object *hooked(Owned *owned, Object *parts, Object *tensor, Object *hooks, Object *sites) {
    Parts self = parts_of(parts);
    if (hooks == self[NONE]) {
        hooks = own(owned, py->call(self[DICT], 0, 0, 0));
        if (!hooks || py->set_attribute(tensor, self[HOOKS], hooks)) return 0;
        Object *registered[] = {own(owned, py->attribute(tensor, self[NODE])), tensor};
        if (!registered[0] || !own(owned, py->method(self[REGISTER], registered, 2, 0))) return 0;
    }
    Object *held[] = {parts, sites}, *of_hook = tuple_of(owned, held, 2);
    Object *hook = of_hook ? own(owned, py->function((void *)py->value(self[DEFINITION]), of_hook, 0)) : 0;
    Object *attached[] = {hooks, hook}, *entry = tuple_of(owned, attached, 2);
    Object *all = own(owned, py->attribute(self[WATCH], self[ATTACHED]));
    if (!entry || !all || py->set_element(hooks, hook, hook) || py->append(all, entry)) return 0;
    return hooks;
}

/* As `GradientWatch._watch`, for a new site. */
static int watch(Owned *owned, Object *parts, Object *key, Object *site, Object *tensor, i64 version) {
    Parts self = parts_of(parts);
    Object *sites = own(owned, py->attribute(self[WATCH], self[OF_SITES]));
    Object *latest = own(owned, py->attribute(self[WATCH], self[LATEST]));
    Object *hooks = own(owned, py->attribute(tensor, self[HOOKS]));
    if (!sites || !latest || !hooks || py->store(sites, key, site)) return -1;
    i64 count = hooks == self[NONE] ? 0 : py->size(hooks);
    if (has_hook(self, latest, tensor, version, count))
        return py->append(py->item(latest, LATEST_SITES), site) ? -1 : 1;
    Object *of_tensor = list_of(owned, site);
    hooks = of_tensor ? hooked(owned, parts, tensor, hooks, of_tensor) : 0;
    if (!hooks) return -1;
    Object *fields[LATEST_ITEMS] = {own(owned, py->reference(tensor, 0)), own(owned, py->integer(version)),
                                    own(owned, py->integer(py->size(hooks))), of_tensor};
    Object *new = tuple_of(owned, fields, LATEST_ITEMS);
    return new && !py->set_attribute(self[WATCH], self[LATEST], new) ? 1 : -1;
}

int watch_output(Owned *owned, Object *parts, Object *made, Object *output, i64 version) {
    Parts self = parts_of(parts);
    if (!is(py->type(output), self[TENSOR]) || !is(py->attribute(output, self[REQUIRES_GRAD]), self[TRUE]) ||
        !is(py->attribute(output, self[IS_LEAF]), self[FALSE]) ||
        !is(py->method(self[IS_VIEW], &output, 1, 0), self[FALSE]) ||
        !returns(self[IS_TRANSFORMED], output, self[FALSE]) || !is_empty(self[WATCH], self[CLONE_AT]) ||
        !is_empty(self[WATCH], self[HOPELESS]))
        return 0;
    Object *named[] = {py->item(made, LAYER), py->item(made, NUMBER), self[EMPTY], self[ROLE]};
    Object *key = tuple_of(owned, named, 4), *sites = own(owned, py->attribute(self[WATCH], self[OF_SITES]));
    if (!key || !sites) return -1;
    if (py->lookup(sites, key)) return 0; /* it is replayed */
    Object *fields[SITE_FIELDS] = {named[0],
                                   py->item(made, MODULE),
                                   named[1],
                                   self[EMPTY],
                                   self[ROLE],
                                   own(owned, py->attribute(output, self[SHAPE])),
                                   own(owned, py->attribute(output, self[DTYPE])),
                                   self[EMPTY]};
    if (!fields[5] || !fields[6]) return -1;
    Object *site = own(owned, py->call(self[SITE], fields, SITE_FIELDS, 0));
    return site ? watch(owned, parts, key, site, output, version) : -1;
}

/* Give a site its gradient. */
static int note(Owned *owned, Parts self, Object *site, Object *gradient) {
    Object *known = own(owned, py->attribute(site, self[PLACE]));
    if (known == self[NONE]) {
        Object *place = own(owned, py->attribute(self[WATCH], self[ARRIVALS]));
        Object *next = place ? own(owned, py->integer(py->value(place) + 1)) : 0;
        if (!next || py->set_attribute(site, self[PLACE], place) ||
            py->set_attribute(self[WATCH], self[ARRIVALS], next))
            return -1;
    }
    Object *given[] = {site, gradient};
    Object *value = known ? own(owned, py->call(self[OBSERVE], given, 2, 0)) : 0;
    return value ? py->set_attribute(site, self[VALUE], value) : -1;
}

/* `GradientWatch._arrive`: the hook of a tensor, of the kind METH_FASTCALL. */
EXPORT Object *arrive(Object *held, Object *const *given, i64 count) {
    Parts self = parts_of(py->item(held, ITS_PARTS));
    Object *sites = py->item(held, SITES), *none = self[NONE];
    if (count != 1 || !is(py->type(given[0]), self[TENSOR]) ||
        !is(py->attribute(self[WATCH], self[LISTENING]), self[TRUE]) || !is_empty(self[WATCH], self[PARTS]) ||
        !is(py->call(self[HAS_GRADIENTS], 0, 0, 0), self[FALSE]) ||
        !is(py->call(self[IS_CASTING], 0, 0, 0), self[FALSE])) {
        Object *left[] = {sites, count == 1 ? given[0] : none};
        return py->call(self[ARRIVE], left, 2, 0);
    }
    Object *taken = py->call(self[ACQUIRE], 0, 0, 0), *bypass = none;
    if (!taken) return 0;
    py->drop(taken);
    Object *exit[] = {0, none, none, none};
    if (self[BYPASS] != none) {
        bypass = exit[0] = py->call(self[BYPASS], 0, 0, 0);
        Object *entered = bypass ? py->method(self[ENTER], exit, 1, 0) : 0;
        if (!entered) {
            py->drop(bypass);
            bypass = 0;
        }
        py->drop(entered);
    }
    int failed = !bypass;
    for (i64 at = 0; !failed && at < py->list_length(sites); at++) {
        Owned owned;
        owned.count = 0;
        failed = note(&owned, self, py->list_item(sites, at), given[0]);
        give_back(&owned);
    }
    if (bypass && bypass != none) {
        always(py->method, self[EXIT], exit, 4);
        py->drop(bypass);
    }
    always(py->call, self[RELEASE], 0, 0);
    if (failed) return 0;
    py->hold(none);
    return none;
}
