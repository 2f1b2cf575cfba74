// What clang's thread-safety analysis is told (-Wthread-safety; `make lint` runs it). Nothing for
// other compilers.
#pragma once

#ifdef __clang__
#define PYCKPT_ANNOTATION(x) __attribute__((x))
#else
#define PYCKPT_ANNOTATION(x)
#endif

// Of a class: it is a mutex; it holds one while it lives.
#define CAPABILITY(name) PYCKPT_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY PYCKPT_ANNOTATION(scoped_lockable)

// Of a member: it is read and written with that mutex held.
#define GUARDED_BY(mutex) PYCKPT_ANNOTATION(guarded_by(mutex))

// Of a function: its caller holds the mutex, and does so still when it returns.
#define REQUIRES(...) PYCKPT_ANNOTATION(requires_capability(__VA_ARGS__))
// Of a function: it takes the mutex, or lets go of it.
#define ACQUIRE(...) PYCKPT_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) PYCKPT_ANNOTATION(release_capability(__VA_ARGS__))
// Of a function: the analysis cannot follow it; a comment there says why it is right.
#define NO_THREAD_SAFETY_ANALYSIS PYCKPT_ANNOTATION(no_thread_safety_analysis)
