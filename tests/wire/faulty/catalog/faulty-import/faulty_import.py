"""An environment whose author made a mistake outside of any function."""

raise KeyError("toop")
