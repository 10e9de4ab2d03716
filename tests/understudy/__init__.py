"""The included model: its corpus, examination and trainers. What they make ships as app.understudy."""
