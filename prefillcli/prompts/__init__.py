"""From rows to prompts: templates, chats, tokens, labels."""
