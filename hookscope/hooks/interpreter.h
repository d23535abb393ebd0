/* What of Python's C API is used here. The caller passes the entry points of the interpreter that runs it, so that one
 * library serves every version and build of CPython. */
#pragma once

typedef long long i64;
typedef struct Object Object; /* PyObject */

typedef struct {
    void (*hold)(Object *);                                       /* Py_IncRef */
    void (*drop)(Object *);                                       /* Py_DecRef; NULL is allowed */
    Object *(*type)(Object *);                                    /* PyObject_Type */
    void *(*slot)(Object *, int);                                 /* PyType_GetSlot */
    Object *(*attribute)(Object *, Object *);                     /* PyObject_GetAttr */
    int (*set_attribute)(Object *, Object *, Object *);           /* PyObject_SetAttr */
    Object *(*element)(Object *, Object *);                       /* PyObject_GetItem */
    int (*set_element)(Object *, Object *, Object *);             /* PyObject_SetItem */
    int (*remove)(Object *, i64);                                 /* PySequence_DelItem */
    i64 (*size)(Object *);                                        /* PyObject_Size */
    Object *(*call)(Object *, Object *const *, i64, Object *);    /* PyObject_Vectorcall */
    Object *(*method)(Object *, Object *const *, i64, Object *);  /* PyObject_VectorcallMethod */
    Object *(*tuple)(i64);                                        /* PyTuple_New */
    int (*set_item)(Object *, i64, Object *);                     /* PyTuple_SetItem; takes the reference */
    Object *(*item)(Object *, i64);                               /* PyTuple_GetItem; borrowed */
    i64 (*length)(Object *);                                      /* PyTuple_Size */
    Object *(*list)(i64);                                         /* PyList_New */
    int (*set_list_item)(Object *, i64, Object *);                /* PyList_SetItem; takes the reference */
    int (*append)(Object *, Object *);                            /* PyList_Append */
    Object *(*list_item)(Object *, i64);                          /* PyList_GetItem; borrowed */
    i64 (*list_length)(Object *);                                 /* PyList_Size */
    Object *(*lookup)(Object *, Object *);                        /* PyDict_GetItemWithError; borrowed */
    int (*store)(Object *, Object *, Object *);                   /* PyDict_SetItem */
    i64 (*dict_length)(Object *);                                 /* PyDict_Size */
    Object *(*integer)(i64);                                      /* PyLong_FromLongLong */
    Object *(*identity)(void *);                                  /* PyLong_FromVoidPtr: what id() returns */
    i64 (*value)(Object *);                                       /* PyLong_AsLongLong */
    Object *(*real)(double);                                      /* PyFloat_FromDouble */
    Object *(*bytes)(const char *, i64);                          /* PyBytes_FromStringAndSize */
    Object *(*reference)(Object *, Object *);                     /* PyWeakref_NewRef */
    void (*clear)(void);                                          /* PyErr_Clear */
    void (*take_error)(Object **, Object **, Object **);          /* PyErr_Fetch */
    void (*put_error)(Object *, Object *, Object *);              /* PyErr_Restore */
    void (*untrack)(void *);                                      /* PyObject_GC_UnTrack */
    Object *(*frame)(void);                                       /* PyEval_GetFrame; borrowed */
    Object *(*function)(void *, Object *, Object *);              /* PyCFunction_NewEx */
} Interpreter;

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))

extern HIDDEN const Interpreter *py;

/* What a function works with besides its arguments: see `Parts` in compiled.py. */
typedef Object *const *Parts;

static inline Parts parts_of(Object *address) { return (Parts)py->value(address); }

#define MOST_OWNED 512 /* more than a call with MOST_INPUTS makes */

/* References to give back when all is recorded. */
typedef struct {
    Object *objects[MOST_OWNED];
    i64 count;
} Owned;

static inline Object *own(Owned *owned, Object *made) {
    if (made) owned->objects[owned->count++] = made;
    return made;
}

static inline void give_back(Owned *owned) {
    while (owned->count) py->drop(owned->objects[--owned->count]);
}

/* Return a tuple of objects that are held elsewhere; NULL if any of them is NULL. */
static inline Object *tuple_of(Owned *owned, Object *const *objects, i64 count) {
    for (i64 at = 0; at < count; at++)
        if (!objects[at]) return 0;
    Object *made = own(owned, py->tuple(count));
    for (i64 at = 0; made && at < count; at++) {
        py->hold(objects[at]);
        py->set_item(made, at, objects[at]);
    }
    return made;
}

/* Return an object of a named tuple's class with these items, a tuple; NULL with an error. A call of `tuple.__new__` would
 * make three more tuples. */
static inline Object *named(Object *class, Object *items) {
    enum { TP_NEW = 65 };
    Object *type = py->type(items), *given = py->tuple(1), *made = 0;
    if (given) {
        py->hold(items);
        py->set_item(given, 0, items);
        made = ((Object * (*)(Object *, Object *, Object *)) py->slot(type, TP_NEW))(class, given, 0);
    }
    py->drop(given);
    py->drop(type);
    return made;
}

/* Hide an object that cannot be in a reference cycle from Python's garbage collector, and return it; NULL is allowed. The
 * collector would walk all that hooks have recorded, several times in a pass. */
static inline Object *acyclic(Object *made) {
    if (made) py->untrack(made);
    return made;
}

/* Return a list that holds an object, or nothing if there is none. */
static inline Object *list_of(Owned *owned, Object *only) {
    Object *made = own(owned, py->list(0));
    return made && only && py->append(made, only) ? 0 : made;
}

/* Tell whether an object is another one, which is held elsewhere, and drop it; clear the error if there is none. */
static inline int is(Object *object, Object *other) {
    if (!object) py->clear();
    py->drop(object);
    return object == other;
}

/* Call a function whatever happens: an error that is pending stays, one that it raises does not. */
static inline void always(Object *(*call)(Object *, Object *const *, i64, Object *), Object *function,
                          Object *const *given, i64 count) {
    Object *type, *value, *trace;
    py->take_error(&type, &value, &trace);
    py->drop(call(function, given, count, 0));
    py->put_error(type, value, trace);
}
