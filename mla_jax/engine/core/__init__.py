"""The engine itself: requests, scheduler, pages, dispatches."""
